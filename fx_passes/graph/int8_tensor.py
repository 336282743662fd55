"""What an Int8Tensor says: the class of the weights that torchao's quantize_() gives to linear layers.

It is known by name: torchao is not imported for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

EPS = torch.finfo(torch.float32).eps  # the smallest scale that torchao chooses
_LIMITS, _REDUCED = (-128, 127), (-64, 63)  # of integers; where reduce_range keeps sums within 16 bits


class Weight(NamedTuple):
    """How a linear layer of an Int8Tensor computes.

    axis     of the weight's scales, as ops.dequantize takes it: None, 0, or sizes of blocks
    how      how scales of the input are chosen, "symmetric" or "asymmetric"; "" where it stays float
    by_rows  whether each row of the input has one
    limits   of the input's integers
    dtype    of what it reads and returns, float32 or bf16
    """

    axis: int | tuple[int, ...] | None
    how: str
    by_rows: bool
    limits: tuple[int, int]
    dtype: torch.dtype

    @property
    def has_zero_points(self) -> bool:
        """Whether torchao reads the weight's zero points: it does for blocks alone."""
        return isinstance(self.axis, tuple)

    @property
    def numbers(self) -> tuple[list[int], str, bool, int, int, torch.dtype]:
        """What an operator takes: [] stands for no axis."""
        axis = [] if self.axis is None else [self.axis] if isinstance(self.axis, int) else list(self.axis)
        return axis, self.how, self.by_rows, *self.limits, self.dtype

    @classmethod
    def of_numbers(
        cls, axis: Sequence[int], how: str, by_rows: bool, low: int, high: int, dtype: torch.dtype
    ) -> Weight:
        """What has these numbers."""
        return cls(tuple(axis) if len(axis) > 1 else axis[0] if axis else None, how, by_rows, (low, high), dtype)


def is_int8_tensor(value: Any) -> bool:
    """Whether value is torchao's Int8Tensor."""
    return type(value).__qualname__ == "Int8Tensor" and type(value).__module__.partition(".")[0] == "torchao"


def understood(weight: Any) -> Weight | None:
    """How a linear layer of this weight computes; None where that is not known, or no primitives compute it."""
    if not is_int8_tensor(weight) or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    others = (weight.act_quant_scale, weight.act_quant_zero_point, weight.act_pre_scale)
    if any(other is not None for other in others) or weight.qdata.ndim != 2 or weight.qdata.dtype != torch.int8:
        return None
    axis = _axis(tuple(weight.block_size), tuple(weight.qdata.shape))
    given = weight.act_quant_kwargs
    if given is None:
        return Weight(axis, "", False, _LIMITS, weight.dtype)
    granularity, how = given.granularity, given.mapping_type.name.lower()
    by_rows = type(granularity).__name__ == "PerRow" and getattr(granularity, "dim", -1) == -1
    if not (by_rows or type(granularity).__name__ == "PerTensor") or how not in ("symmetric", "asymmetric"):
        return None
    if weight.dtype != torch.float32 and (how != "symmetric" or not by_rows):
        return None
    limits = _REDUCED if given.reduce_range else _LIMITS
    return None if isinstance(axis, tuple) else Weight(axis, how, by_rows, limits, weight.dtype)


def _axis(block: tuple[int, ...], shape: tuple[int, ...]) -> int | tuple[int, ...] | None:
    if block == shape:
        return None
    return 0 if block == (1, shape[1]) else block
