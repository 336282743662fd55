"""Freed memory goes back to the operating system."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from typing import Any


def trim_heap() -> None:
    """Hand freed memory back to the operating system, where the C library can.

    What lowering leaves behind (folded weights among it) lies in reference cycles: collected first.
    """
    gc.collect()
    give_back_free_memory()


def free_recent_cycles() -> None:
    """Collect what was made since the collector was paused, and is garbage: what is older is not looked at."""
    gc.collect(0)


def give_back_free_memory() -> None:
    """Hand freed memory back to the operating system, where the C library can; some milliseconds."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Any:
    """The C library's function, None where it has none."""
    with contextlib.suppress(OSError, AttributeError):
        return ctypes.CDLL(None).malloc_trim
    return None
