"""While a forward is traced, PyTorch's random number generator refuses to be seeded: a graph would leave that out."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from zendnn_cffi.locks import new_lock

_SEEDING = ("manual_seed", "seed", "set_state")
_ON_THE_WAY = ("torch.random", "contextlib", __name__)  # modules that lead from who seeds to the generator
_COMPILER = ("torch._dynamo.convert_frame", "torch._dynamo.utils")  # not all of it: it wraps torch.manual_seed
_tracing: list[int] = []  # threads, one entry for each time that they entered
_lock = new_lock()


class _Refusing:
    """PyTorch's default generator, which threads that trace cannot seed."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        if name in _SEEDING and threading.get_ident() in _tracing and not _is_compiler():
            raise RuntimeError("forward seeds PyTorch's random number generator, which a graph would leave out")
        return getattr(self._generator, name)


def _is_compiler() -> bool:
    """Whether TorchDynamo asks, which puts the state back that it found: it compiles the branches of torch.cond.

    An exception there would leave its own state half restored, for the whole process.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _ON_THE_WAY:
        frame = frame.f_back
    return frame.f_globals.get("__name__") in _COMPILER


@contextlib.contextmanager
def refuse_seeding() -> Iterator[None]:
    """Let torch.manual_seed, torch.seed, torch.set_rng_state and torch.random.fork_rng raise RuntimeError meanwhile.

    In this thread only. Random numbers can still be drawn: C++ code has the generator itself.
    """
    me = threading.get_ident()
    with _lock:
        if not _tracing:
            torch.random.default_generator = _Refusing(torch.random.default_generator)
        _tracing.append(me)
    try:
        yield
    finally:
        with _lock:
            _tracing.remove(me)
            if not _tracing and isinstance(torch.random.default_generator, _Refusing):
                torch.random.default_generator = torch.random.default_generator._generator
