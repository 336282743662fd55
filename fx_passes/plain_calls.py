"""Calls of a model's own forward: why they came to it, and the tracing of it, which they disturb from other threads.

A forward may set globals for a moment, as Transformers does to collect hidden states. Who traces meanwhile finds that
the model changes them, and PyTorch's own tables of traced functions are not made for two threads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from zendnn_cffi.locks import new_lock

_PATIENCE_SECONDS = 60.0  # of calls; a forward may wait for another thread's
_LONGEST_SECONDS = 10.0  # that tracing waits for calls
_POLL_SECONDS = 0.001
_MOST_REASONS = 8


class Reasons:
    """Why calls stayed plain PyTorch, and how many did, the latest last."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}

    def add(self, reason: str, calls: int = 1) -> bool:
        """Count calls that did. Returns whether the reason is a new one."""
        known = dict(self._calls)  # replaced whole: another thread may read it
        calls += known.pop(reason, 0)
        is_new = reason not in self._calls
        self._calls = dict([*known.items(), (reason, calls)][-_MOST_REASONS:])
        return is_new

    @property
    def texts(self) -> list[str]:
        return list(self._calls)

    @property
    def counted(self) -> str:
        """The reasons in a sentence: "A (2 calls); B"."""
        return "; ".join(why if calls < 2 else f"{why} ({calls} calls)" for why, calls in self._calls.items())


class PlainCalls:
    """Counts the calls of one model's own forward that run, by thread."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._running: dict[int, int] = {}
        self._traced_in = 0  # the thread that does

    @contextmanager
    def one(self) -> Iterator[None]:
        """A call: it waits while another thread traces."""
        me, begun = get_ident(), time.monotonic()
        if self._process != os.getpid():  # a forked child has none of the threads
            self._begin_anew()
        while not self._enter(me, time.monotonic() - begun > _PATIENCE_SECONDS):
            time.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            with self._lock:
                left = self._running.pop(me, 0) - 1  # none in a child that was forked in the midst of it
                if left > 0:
                    self._running[me] = left

    def _enter(self, me: int, at_once: bool) -> bool:
        with self._lock:
            may = at_once or self._traced_in in (0, me) or me in self._running
            if may:
                self._running[me] = self._running.get(me, 0) + 1
            return may

    @contextmanager
    def none(self) -> Iterator[bool]:
        """While the model is traced: calls of other threads wait. Yields whether those that ran have ended."""
        me, begun = get_ident(), time.monotonic()
        if self._process != os.getpid():
            self._begin_anew()
        with self._lock:
            is_first = not self._traced_in
            self._traced_in = self._traced_in or me
        if not is_first:
            yield False
            return
        try:
            while (others := self._running.keys() - {me}) and time.monotonic() - begun < _LONGEST_SECONDS:
                time.sleep(_POLL_SECONDS)
            yield not others
        finally:
            self._traced_in = 0
