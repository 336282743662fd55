"""Numbers kept as integers: kept = round(value / scale) + zero_point, value = (kept - zero_point) * scale.

scale and zero_point are numbers or tensors, and axis says what they belong to:
    None     the whole tensor
    a dim    each index of that dimension, [size of it]
    TOKEN    each row along the last dimension, [..., 1]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fx_passes.ops.registry import COMPUTE, op

TOKEN = "token"
Axis = int | str | None


def _along(values: Any, axis: Axis, ndim: int) -> Any:
    """Scales or zero points, shaped to broadcast over a tensor of ndim dimensions."""
    if axis is None and isinstance(values, Tensor):
        return values.reshape(())
    if isinstance(axis, int) and values is not None:
        return values.reshape([-1 if dim == axis % ndim else 1 for dim in range(ndim)])
    return values


@op(kind=COMPUTE, light=True, opens_region=False, shape="same", shares_memory=True)
def quantize(src: Tensor, scale: Any, zero_point: Any, axis: Axis, low: Any, high: Any, dtype: torch.dtype) -> Tensor:
    """Return clamp(round(src / scale) + zero_point, low, high) in dtype; with TOKEN it adds before it rounds."""
    if axis == TOKEN:
        return src.mul(1.0 / scale).add(zero_point).round().clamp(low, high).to(dtype)
    values = src.float() if src.dtype in (torch.float16, torch.bfloat16) else src
    inverse, shift = 1.0 / _along(scale, axis, src.ndim), _along(zero_point, axis, src.ndim)
    return torch.clamp(torch.round(values * inverse) + shift, low, high).to(dtype)


@op(kind=COMPUTE, light=True, opens_region=False, shape="same", shares_memory=True)
def dequantize(src: Tensor, scale: Any, zero_point: Any, axis: Axis, dtype: torch.dtype) -> Tensor:
    """Return (src - zero_point) * scale in dtype; zero_point None: nothing is subtracted."""
    factor, shift = _along(scale, axis, src.ndim), _along(zero_point, axis, src.ndim)
    kept = src.to(dtype) if axis is None else src
    return ((kept if shift is None else kept - shift) * factor).to(dtype)
