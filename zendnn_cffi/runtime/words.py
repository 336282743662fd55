"""Words of memory, read where they lie: many at once, by one gather of numpy's, so that their cache misses overlap.

Who uses it sees to it that the memory stays: it is read without a question.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

PLAIN = (torch.Tensor, torch.nn.Parameter)  # types of tensors that keep all where PyTorch does; subclasses need not
_TYPES = {4: "<u4", 8: "<u8"}


class Words:
    """Words of `size` bytes, 4 or 8, at these addresses, multiples of size."""

    def __init__(self, addresses: Sequence[int], size: int) -> None:
        # As places in all memory taken as one array, which begins at address `size`: NULL is no array.
        self._places = np.array(addresses, dtype=np.int64) // size - 1
        self._memory = np.asarray(_Memory(max(addresses, default=size), size))
        self._known = self.now()

    def unchanged(self) -> bool:
        """Whether they are what they were when this was made."""
        return self.now() == self._known

    def now(self) -> bytes:
        """What they are."""
        return self._memory.take(self._places, mode="clip").tobytes()


class _Memory:
    """All memory up to an address as one array of numpy's; only what is indexed is read."""

    def __init__(self, last: int, size: int) -> None:
        self.__array_interface__ = {
            "shape": (last // size,), "typestr": _TYPES[size], "data": (size, True), "version": 3}  # fmt: skip


def words_at(address: int, count: int) -> list[int]:
    """`count` words of 8 bytes from an address on."""
    return list((ctypes.c_uint64 * count).from_address(address))
