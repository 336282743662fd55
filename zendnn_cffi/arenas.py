"""What programs keep between calls, counted and bounded over the whole process.

A program keeps its execution contexts (arena and memory handles) for the next call. Where the arenas of all programs
together would pass the limit, those least recently used give up their idle contexts first; they are made again when
such a program is called again. A context that a call is using right now always stays.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zendnn_cffi.program import Program

LIMIT_VARIABLE = "ZENDNN_CFFI_ARENA_MB"
DEFAULT_LIMIT_MB = 2048

clock = itertools.count(1)  # next(clock) orders uses; atomic under the interpreter lock
_programs: weakref.WeakSet[Program] = weakref.WeakSet()
_lock = threading.Lock()


def limit_bytes() -> int:
    """How many bytes the arenas of all programs may have together (ZENDNN_CFFI_ARENA_MB, in MiB; default 2048)."""
    try:
        return int(float(os.environ[LIMIT_VARIABLE]) * (1 << 20))
    except (KeyError, ValueError, OverflowError):
        return DEFAULT_LIMIT_MB << 20


def register(program: Program) -> None:
    """Count a new program."""
    with _lock:
        _programs.add(program)


def programs() -> list[Program]:
    """Every living program."""
    with _lock:
        return list(_programs)


def make_room(size_bytes: int) -> None:
    """Free idle arenas, least recently used first, until another one of this size fits the limit or none is idle."""
    alive = sorted(programs(), key=lambda program: program.last_used)
    excess = sum(program.arenas_bytes for program in alive) + size_bytes - limit_bytes()
    for program in alive:
        if excess <= 0:
            break
        excess -= program.free_idle()
