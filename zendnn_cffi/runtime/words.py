"""Words of memory, read where they lie: many at once, by one gather of numpy's, so that their cache misses overlap.

A few are read one by one: a gather takes 0.9 us, and 10 where a call evicted numpy's code. Who uses it sees to it that
the memory stays: it is read without a question.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

PLAIN = (torch.Tensor, torch.nn.Parameter)  # types of tensors that keep all where PyTorch does; subclasses need not
_TYPES = {4: "<u4", 8: "<u8"}
_NUMBERS = {4: ctypes.c_uint32, 8: ctypes.c_uint64}
_FEW = 6


class Words:
    """Words of `size` bytes, 4 or 8, at these addresses, multiples of size."""

    def __init__(self, addresses: Sequence[int], size: int) -> None:
        self._few = [_NUMBERS[size].from_address(address) for address in addresses] if len(addresses) <= _FEW else None
        # As places in all memory taken as one array, which begins at address `size`: NULL is no array.
        self._places = np.array(addresses, dtype=np.int64) // size - 1
        self._memory = np.asarray(_Memory(max(addresses, default=size), size))
        self._known = self.now()

    def unchanged(self) -> bool:
        """Whether they are what they were when this was made."""
        return self.now() == self._known

    def now(self) -> Any:
        """What they are: equal for equal words."""
        if self._few is not None:
            return [word.value for word in self._few]
        return self._memory.take(self._places, mode="clip").tobytes()


class _Memory:
    """All memory up to an address as one array of numpy's; only what is indexed is read."""

    def __init__(self, last: int, size: int) -> None:
        self.__array_interface__ = {
            "shape": (last // size,), "typestr": _TYPES[size], "data": (size, True), "version": 3}  # fmt: skip


def words_at(address: int, count: int) -> list[int]:
    """`count` words of 8 bytes from an address on."""
    return list((ctypes.c_uint64 * count).from_address(address))
