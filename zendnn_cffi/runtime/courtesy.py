"""Long work in Python beside calls: it waits while one runs, and goes on in slices where one always does.

A call gives up the interpreter's lock around each primitive, and whoever computes in Python keeps it for 5 ms then. A
call of sixty primitives would wait for it sixty times.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zendnn_cffi.runtime import arenas

SLICE_SECONDS = 2e-3  # of work, where calls follow each other without a pause
LONGEST_WAIT_SECONDS = 0.05  # before a slice
_POLL_SECONDS = 3e-3

_own = threading.local()


@contextmanager
def giving_way(is_urgent: Callable[[], bool]) -> Iterator[None]:
    """Let give_way() wait in this thread, unless somebody waits for what it does."""
    _own.is_urgent, _own.slice_ends = is_urgent, 0.0
    try:
        yield
    finally:
        _own.is_urgent = None


def give_way() -> None:
    """Called between steps of long work: wait while calls run, in a thread that has no hurry; else nothing."""
    is_urgent = getattr(_own, "is_urgent", None)
    if is_urgent is None or time.perf_counter() < _own.slice_ends:
        return
    until = time.perf_counter() + LONGEST_WAIT_SECONDS
    while arenas.are_in_use() and time.perf_counter() < until and not is_urgent():
        time.sleep(_POLL_SECONDS)
    _own.slice_ends = time.perf_counter() + SLICE_SECONDS
