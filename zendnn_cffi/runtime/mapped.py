"""Memory that a file is mapped into."""

from __future__ import annotations

import ctypes
import mmap
from functools import lru_cache
from typing import Any

import torch


def let_go(tensor: torch.Tensor) -> None:
    """Take a tensor's pages out of this process: what is read again comes from the file, by the system's cache.

    tensor  mapped from a file, and not written to: writes are lost
    """
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first and (madvise := _madvise()) is not None:
        madvise(first, last - first, mmap.MADV_DONTNEED)


@lru_cache(maxsize=1)
def _madvise() -> Any:
    """The C function, where the system has it."""
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is None or not hasattr(mmap, "MADV_DONTNEED"):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
