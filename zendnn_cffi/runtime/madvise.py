"""The C function madvise, for memory that Python's mmap module did not map."""

from __future__ import annotations

import ctypes
import mmap
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def madvise() -> Any:
    """Return the function(address, size in bytes, advice), which returns 0 or refuses; None where there is none."""
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is None or not hasattr(mmap, "MADV_DONTNEED"):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
