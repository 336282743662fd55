"""What an Int8Tensor says: the class of the weights that torchao's quantize_() gives to linear layers.

An IntxUnpackedToInt8Tensor (1 to 8 bits, each in a byte) has the same parts, and so has a Float8Tensor, but for zero
points. They are known by name: torchao is not imported for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

EPS = torch.finfo(torch.float32).eps  # the smallest scale that torchao chooses
_INTX_EPS = torch.finfo(torch.float32).tiny
LIMITS = _LIMITS, _REDUCED = (-128, 127), (-64, 63)  # of integers; where reduce_range keeps sums within 16 bits
STATIC = "static "
PARTS = ("qdata", "scale", "zero_point", "act_pre_scale", "act_quant_scale", "act_quant_zero_point")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of layers; float16 is known where inputs stay float
_INT8, _INTX, _FLOAT8 = "Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor"


class Weight(NamedTuple):
    """How a linear layer of an Int8Tensor computes.

    axis       of the weight's scales, as ops.dequantize takes it: None, 0, or sizes of blocks
    how        how scales of the input are chosen, "symmetric" or "asymmetric"; "" where it stays float; STATIC and one
               of the two where the weight has its scale
    by_rows    whether each row of the input has one
    limits     of the input's integers
    dtype      of what it reads and returns, float32, bf16 or f16
    eps        the smallest scale of the input
    more       names of tensors that the layer reads beside qdata, scale and zero_point
    is_float8  whether the weight has 8-bit floats, and no zero points
    """

    axis: int | tuple[int, ...] | None
    how: str
    by_rows: bool
    limits: tuple[int, int]
    dtype: torch.dtype
    eps: float = EPS
    more: tuple[str, ...] = ()
    is_float8: bool = False

    @property
    def has_zero_points(self) -> bool:
        """Whether torchao reads the weight's zero points: it does for blocks alone."""
        return isinstance(self.axis, tuple) and not self.is_float8

    @property
    def rounds_in_torch(self) -> bool:
        """Whether PyTorch rounds the input, as torchao does, and the layer multiplies floats."""
        return self.by_rows and self.how == "asymmetric" and self.dtype != torch.float32

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors that the layer reads."""
        return ("qdata", "scale", *(("zero_point",) if self.has_zero_points else ()), *self.more)

    @property
    def numbers(self) -> tuple[list[int], str, bool, int, int, torch.dtype, float]:
        """What an operator takes: [] stands for no axis."""
        axis = [] if self.axis is None else [self.axis] if isinstance(self.axis, int) else list(self.axis)
        return axis, self.how, self.by_rows, *self.limits, self.dtype, self.eps

    @classmethod
    def of_numbers(
        cls, axis: Sequence[int], how: str, by_rows: bool, low: int, high: int, dtype: torch.dtype, eps: float
    ) -> Weight:
        """What has these numbers."""
        sizes = tuple(axis) if len(axis) > 1 else axis[0] if axis else None
        return cls(sizes, how, by_rows, (low, high), dtype, eps)


def is_int8_tensor(value: Any) -> bool:
    """Whether value is torchao's Int8Tensor, or has its parts: IntxUnpackedToInt8Tensor and Float8Tensor."""
    return _class_of(value) in (_INT8, _INTX, _FLOAT8)


def _class_of(value: Any) -> str:
    """The name of a class of torchao; "" for others."""
    return type(value).__qualname__ if type(value).__module__.partition(".")[0] == "torchao" else ""


def understood(weight: Any) -> Weight | None:
    """How a linear layer of this weight computes; None where that is not known, or no primitives compute it."""
    known = _understood(weight) if is_int8_tensor(weight) and weight.dtype in DTYPES else None
    return None if known is not None and known.how and weight.dtype == torch.float16 else known


def _understood(weight: Any) -> Weight | None:
    """The same for a weight of torchao in one of the dtypes."""
    if _class_of(weight) == _INTX:
        return _understood_intx(weight)
    if _class_of(weight) == _FLOAT8:
        return _understood_float8(weight)
    if weight.qdata.ndim != 2 or weight.qdata.dtype != torch.int8:
        return None
    axis = _axis(tuple(weight.block_size), tuple(weight.qdata.shape))
    given, before = weight.act_quant_kwargs, weight.act_pre_scale
    if before is not None and (before.dtype != weight.dtype or tuple(before.shape) not in ((), weight.qdata.shape[1:])):
        return None
    more = () if before is None else ("act_pre_scale",)
    if given is None:
        return Weight(axis, "", False, _LIMITS, weight.dtype, more=more)
    granularity, how = given.granularity, given.mapping_type.name.lower()
    by_rows = type(granularity).__name__ == "PerRow" and getattr(granularity, "dim", -1) == -1
    if not (by_rows or type(granularity).__name__ == "PerTensor") or how not in ("symmetric", "asymmetric"):
        return None
    if weight.dtype != torch.float32 and (how != "symmetric" or not by_rows):
        return None
    if isinstance(axis, tuple):
        return None
    limits = _REDUCED if given.reduce_range else _LIMITS
    if weight.act_quant_scale is not None:
        static = _static_parts(weight, by_rows)
        return Weight(axis, STATIC + how, False, limits, weight.dtype, more=(*more, *static)) if static else None
    return Weight(axis, how, by_rows, limits, weight.dtype, more=more) if weight.act_quant_zero_point is None else None


def table_blocks(weight: Any) -> tuple[int, ...] | None:
    """Sizes of the blocks that have a scale, where F.embedding takes this table and rows can be dequantized alone."""
    known = understood(weight) if _class_of(weight) in (_INTX, _FLOAT8) else None
    if known is None or known.how or not isinstance(known.axis, tuple):
        return None
    block = known.axis
    return block if block[0] == 1 else None


def _static_parts(weight: Any, by_rows: bool) -> tuple[str, ...]:
    """The tensors that say how the input is quantized, where that is one scale in float32; none elsewhere."""
    scale, zero_point = weight.act_quant_scale, weight.act_quant_zero_point
    if by_rows or scale.numel() != 1 or weight.dtype != torch.float32 or scale.dtype != torch.float32:
        return ()
    if zero_point is None:
        return ("act_quant_scale",)
    return ("act_quant_scale", "act_quant_zero_point") if zero_point.numel() == 1 else ()


def _understood_intx(weight: Any) -> Weight | None:
    """The same for an IntxUnpackedToInt8Tensor, which has zero points whatever its blocks are."""
    block, shape = tuple(weight.block_size), tuple(weight.qdata.shape)
    given = weight.activation_quantization
    if len(shape) != 2 or weight.dtype != weight.scale.dtype:
        return None
    if given is None:
        return Weight(block, "", False, _LIMITS, weight.dtype)
    by_rows = given == "int8_asym_per_token"
    if not by_rows:
        return None
    return Weight(block, "asymmetric", True, _LIMITS, weight.dtype, _INTX_EPS)


def _understood_float8(weight: Any) -> Weight | None:
    """The same for a Float8Tensor, where its input stays as it is."""
    shape, scale = tuple(weight.qdata.shape), weight.scale
    block = tuple(weight.block_size or shape)
    if weight.act_quant_kwargs is not None or len(shape) != 2 or scale.dtype != torch.float32:
        return None
    if len(block) != 2 or any(n % size for n, size in zip(shape, block, strict=True)):
        return None
    counts = tuple(n // size for n, size in zip(shape, block, strict=True))
    fits = tuple(scale.shape) == counts or (scale.numel() == 1 and counts == (1, 1))
    return Weight(block, "", False, _LIMITS, weight.dtype, is_float8=True) if fits else None


def _axis(block: tuple[int, ...], shape: tuple[int, ...]) -> int | tuple[int, ...] | None:
    if block == shape:
        return None
    return 0 if block == (1, shape[1]) else block
