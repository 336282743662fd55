"""Memory that a file is mapped into."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch


def let_go(tensors: Iterable[torch.Tensor]) -> None:
    """Take tensors' pages out of this process: what is read again comes from the file, by the system's cache.

    tensors  mapped from a file, and not written to: writes are lost. Those side by side are one call.
    """
    if (madvise := _madvise()) is None:
        return
    spans: list[tuple[int, int]] = []
    for begin, size_bytes in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors):
        if spans and begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], begin + size_bytes)
        else:
            spans.append((begin, begin + size_bytes))
    for begin, end in spans:
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            madvise(first, last - first, mmap.MADV_DONTNEED)


@lru_cache(maxsize=1)
def _madvise() -> Any:
    """The C function, where the system has it."""
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is None or not hasattr(mmap, "MADV_DONTNEED"):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
