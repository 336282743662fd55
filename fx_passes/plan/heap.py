"""Freed memory goes back to the operating system."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def trim_heap() -> None:
    """Hand freed memory back to the operating system, where the C library can.

    What lowering leaves behind (folded weights among it) lies in reference cycles: collected first.
    """
    gc.collect()
    give_back_free_memory()


def give_back_free_memory() -> None:
    """Hand freed memory back to the operating system, where the C library can; some milliseconds."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
