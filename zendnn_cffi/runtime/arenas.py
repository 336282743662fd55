"""Memory for activations, shared by all programs that do not run at once; and what programs there are.

A program that runs has an arena to itself. Another one may compute in the same memory afterwards: nothing in an arena
outlives a run. So there are as many arenas as programs ran at once, each as large as the largest that ran in it, and
not one per program. What a program keeps (memory handles, tensors) points into the arena it last ran in. Where a
larger one is needed, it replaces those that nobody uses, and programs point their handles anew when they run again.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from typing import Protocol

import torch

from zendnn_cffi.locks import new_lock
from zendnn_cffi.runtime import huge_pages
from zendnn_cffi.runtime.sizes import rounded_up


class Program(Protocol):
    """What is counted here."""

    def leave_outgrown(self) -> None: ...

    def free_idle(self) -> None: ...


LIMIT_VARIABLE = "ZENDNN_CFFI_ARENA_MB"
DEFAULT_LIMIT_MB = 2048
_SMALLEST_BYTES = 4096

clock = itertools.count(1)  # next(clock) orders uses; atomic under the interpreter lock


class Arena:
    """Memory that one running program at a time computes in.

    is_outgrown  nothing will run in it any more
    """

    __slots__ = ("__weakref__", "_taken", "is_outgrown", "memory", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        """Not taken yet; size_bytes, or up to an eighth more. Raises MemoryError."""
        # a little larger image does without another arena; what is not touched is no memory
        self.size_bytes = rounded_up(max(size_bytes, _SMALLEST_BYTES))
        with torch.inference_mode(False):
            self.memory = huge_pages.allocate(self.size_bytes, late=True)
        self.is_outgrown = False
        self._taken = threading.Lock()

    def take(self) -> bool:
        """Take it for a run, if nobody has it."""
        return self._taken.acquire(blocking=False)

    def give_back(self) -> None:
        """The run has ended."""
        self._taken.release()

    @property
    def is_in_use(self) -> bool:
        """Whether a run has it."""
        return self._taken.locked() and not self.is_outgrown

    def retire(self) -> bool:
        """Let nothing run in it any more, if nobody has it now."""
        if self.take():  # for good
            self.is_outgrown = True
        return self.is_outgrown


_lock = new_lock()
_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
_programs: weakref.WeakSet[Program] = weakref.WeakSet()


def limit_bytes() -> int:
    """How many bytes the arenas of all programs may have together (ZENDNN_CFFI_ARENA_MB, in MiB; default 2048)."""
    try:
        return int(float(os.environ[LIMIT_VARIABLE]) * (1 << 20))
    except (KeyError, ValueError, OverflowError):
        return DEFAULT_LIMIT_MB << 20


def size_bytes() -> int:
    """Bytes of all arenas there are."""
    with _lock:
        return sum(arena.size_bytes for arena in _arenas)


def are_in_use() -> bool:
    """Whether any program runs just now."""
    with _lock:
        return any(arena.is_in_use for arena in _arenas)


def register(program: Program) -> None:
    """Count a new program."""
    with _lock:
        _programs.add(program)


def programs() -> list[Program]:
    """Every living program."""
    with _lock:
        return list(_programs)


def taken(size_bytes: int) -> Arena:
    """Return an arena of at least this size, taken: the smallest that is free, or a new one in place of the free ones.

    Arenas that other calls are using stay; where there are so many that they pass the limit, all others go.
    """
    with _lock:
        arenas = sorted(_arenas, key=lambda arena: arena.size_bytes)
        found = next((arena for arena in arenas if arena.size_bytes >= size_bytes and arena.take()), None)
        if found is None:
            outgrown = [arena for arena in arenas if arena.retire()]
        else:
            outgrown = []
            if sum(arena.size_bytes for arena in arenas) > limit_bytes():
                outgrown = [arena for arena in arenas if arena is not found and arena.retire()]
        if outgrown:
            del arenas
            for program in programs():
                program.leave_outgrown()
            outgrown.clear()
        if found is None:
            found = Arena(size_bytes)
            found.take()
            _arenas.add(found)
        return found


def _leave_to_parent() -> None:
    """In a forked child: what its parent's other threads computed in is given back by nobody."""
    for arena in list(_arenas):
        if arena.is_in_use:
            arena.is_outgrown = True
            _arenas.discard(arena)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
