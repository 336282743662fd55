"""Where the arguments of calls lie: places in memory, seen with a shape, strides and a dtype."""

from __future__ import annotations

import math

import torch

from zendnn_cffi.values import dataclass


@dataclass(frozen=True)
class Slot:
    """Where a tensor lives: space "input", "output", "arena" or "constant", index within it, offset in bytes."""

    space: str
    index: int = 0
    offset_bytes: int = 0

    @property
    def moves(self) -> bool:
        """Whether its memory is another one in each run."""
        return self.space in ("input", "output")

    def behind(self, offset_bytes: int) -> Slot:
        """The place that many bytes further on."""
        return Slot(self.space, self.index, self.offset_bytes + offset_bytes)


@dataclass(frozen=True)
class TensorView:
    """A tensor that a torch call reads or writes: a slot seen with a shape, strides (in elements) and a dtype.

    grows  the input or output of this run as it is, whatever its shape
    """

    slot: Slot
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    grows: bool = False

    @property
    def used_bytes(self) -> int:
        """Bytes of its elements; an expanded dimension is there once."""
        return self.dtype.itemsize * math.prod(n for n, s in zip(self.shape, self.strides, strict=True) if s)
