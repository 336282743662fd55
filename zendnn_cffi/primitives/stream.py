"""The CPU engine and its streams.

Source: zendnn.h of ZenDNN 5.1, groups zendnn_api_engine and zendnn_api_stream.
"""

from __future__ import annotations

import threading
from typing import Any

from zendnn_cffi.errors import check
from zendnn_cffi.locks import new_lock
from zendnn_cffi.primitives import checks
from zendnn_cffi.primitives.handles import NotCopyable, native, new_handle


class Engine(NotCopyable):
    """The CPU engine. ``Engine.cpu()`` is the shared one; own engines are possible and independent."""

    __slots__ = ("_handle",)
    _shared: Engine | None = None
    _shared_handle: Any = None
    _lock = new_lock()

    def __init__(self, kind: str = "cpu", index: int = 0) -> None:
        """Raises ValueError unless kind is "cpu" and index 0: the library has no other engine."""
        if not isinstance(kind, str) or kind != "cpu" or checks.as_int(index, "index") != 0:
            raise ValueError(f"the library has one engine, kind 'cpu' index 0, got kind {kind!r} index {index!r}")
        lib = native().lib
        self._handle = new_handle(
            lib.zendnn_engine_create, lib.zendnn_engine_destroy, "zendnn_engine_t", "creating the CPU engine", 1, 0
        )

    @classmethod
    def cpu(cls) -> Engine:
        """Return the shared CPU engine, creating it on the first call.

        Closed, it comes back with the handle it had: primitives that are kept, and streams, are of that one.
        """
        engine = cls._shared
        if engine is not None and engine._handle is not None:
            return engine
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
                cls._shared_handle = cls._shared._handle
            elif cls._shared._handle is None:
                again = cls.__new__(cls)
                again._handle = cls._shared_handle
                cls._shared = again
            return cls._shared

    @property
    def handle(self) -> Any:
        if self._handle is None:
            raise ValueError("the engine is closed: create a new Engine, or use Engine.cpu()")
        return self._handle

    def close(self) -> None:
        """Give up the handle; whatever was made with it keeps working. Closing twice is allowed."""
        self._handle = None

    def __repr__(self) -> str:
        return f"Engine(cpu{', closed' if self._handle is None else ''})"


def engine_or_shared(engine: Engine | None) -> Engine:
    """Return the engine, the shared one for None. Raises TypeError for anything else."""
    if engine is None:
        return Engine.cpu()
    if not isinstance(engine, Engine):
        raise TypeError(f"engine must be an Engine such as Engine.cpu(), or None, got {engine!r}")
    return engine


class Stream(NotCopyable):
    """An in-order stream: ``execute`` returns when the work is done."""

    __slots__ = ("_handle", "_engine_handle", "engine")

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine_or_shared(engine)
        self._engine_handle = self.engine.handle
        lib = native().lib
        self._handle = new_handle(
            lib.zendnn_stream_create,
            lib.zendnn_stream_destroy,
            "zendnn_stream_t",
            "creating a stream",
            self._engine_handle,
            1,
        )

    @property
    def handle(self) -> Any:
        if self._handle is None:
            raise ValueError("the stream is closed: create a new Stream, or leave it out for the thread's default one")
        return self._handle

    def wait(self) -> None:
        """Return when all work given to the stream is done (with an in-order CPU stream it is already)."""
        check(native().lib.zendnn_stream_wait(self.handle), "waiting for a stream")

    def close(self) -> None:
        """Give up the handle. Closing twice is allowed."""
        self._handle = None

    def __repr__(self) -> str:
        return f"Stream(cpu{', closed' if self._handle is None else ''})"


_thread = threading.local()


def default_stream() -> Stream:
    """Return the calling thread's stream on the shared engine."""
    stream: Stream | None = getattr(_thread, "stream", None)
    if stream is None or stream._handle is None:
        stream = _thread.stream = Stream()
    return stream
