"""Memory for a primitive under test: where reading or writing beyond an operand shows."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Protocol

import torch

POISON = 0xFF  # as float32 and bfloat16: not a number
_ALIGNMENT = 64
_LARGEST_BORDER = 16 << 20


class Place(Protocol):
    """Memory of one operand: ``inside`` is its bytes, uint8."""

    inside: torch.Tensor

    def is_intact(self) -> bool:
        """Whether nothing was written around it."""


Take = Callable[[int], Place]


class Bordered:
    """Bytes between two borders of poison: what is read there spoils the result, what is written there is seen.

    border_bytes  of each border
    """

    def __init__(self, size_bytes: int, border_bytes: int, poison: int = POISON) -> None:
        self._poison = poison
        whole = torch.full((size_bytes + 2 * border_bytes + _ALIGNMENT,), poison, dtype=torch.uint8, device="cpu")
        start = border_bytes + -(whole.data_ptr() + border_bytes) % _ALIGNMENT
        self.inside = whole[start : start + size_bytes]
        self._borders = whole[:start], whole[start + size_bytes :]

    def is_intact(self) -> bool:
        return all(int(border.min()) == int(border.max()) == self._poison for border in self._borders)


def border_bytes(sizes: list[int]) -> int:
    """Return a border that catches an operand read in the shape of the largest one."""
    return min(max([4096, *sizes]), _LARGEST_BORDER)


class Guarded:
    """Bytes right before an unreadable page, or right behind one: touching it ends the process (SIGSEGV).

    at_end  True: the page follows; False: it precedes
    """

    def __init__(self, size_bytes: int, at_end: bool) -> None:
        page = mmap.PAGESIZE
        self._size = -(-max(size_bytes, 1) // page) * page + 2 * page
        self._base = _map(self._size)
        if _libc.mprotect(self._base + page, self._size - 2 * page, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), "mprotect")
        start = self._base + page if not at_end else self._base + self._size - page - size_bytes
        ctypes.memset(self._base + page, POISON, self._size - 2 * page)
        array = (ctypes.c_uint8 * max(size_bytes, 1)).from_address(start)
        self.inside = torch.frombuffer(array, dtype=torch.uint8)[:size_bytes]

    def is_intact(self) -> bool:
        return True

    def __del__(self) -> None:
        if getattr(self, "_base", None):
            _libc.munmap(self._base, self._size)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)  # fmt: skip
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def _map(size: int) -> int:
    """Return the address of new pages that nobody may touch."""
    address = _libc.mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return int(address)
