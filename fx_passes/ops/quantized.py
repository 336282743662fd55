"""Numbers kept as integers: kept = round(value / scale) + zero_point, value = (kept - zero_point) * scale.

scale and zero_point are numbers or tensors, and axis says what they belong to:
    None     the whole tensor
    a dim    each index of that dimension, [size of it]
    TOKEN    each row along the last dimension, [..., 1]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_passes.ops.pointwise import PostOps, apply_post_ops
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


@op(kind=COMPUTE, light=True, opens_region=False)
def choose_scale(src: Tensor, low: int, high: int, eps: float, dtype: torch.dtype, symmetric: bool) -> Tensor:
    """Return how src is quantized as a whole, as operators choose_qparams of quantized_decomposed choose it.

    src      float32 [...], not empty
    Returns  float32 [4]: scale, 1 / scale, zero point, and the bits of the zero point as an int32
    """
    import torch.ao.quantization.fx._decomposed  # registers the operators

    form = "choose_qparams_symmetric" if symmetric else "choose_qparams"
    scale, zero_point = getattr(torch.ops.quantized_decomposed, form).tensor(src, low, high, eps, dtype)
    numbers = [number.to(torch.float32) for number in (scale, 1.0 / scale, zero_point)]
    return torch.cat([*numbers, zero_point.to(torch.int32).view(torch.float32)])


@op(kind=COMPUTE, light=True, opens_region=False, shape="same")
def quantize_by(src: Tensor, chosen: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Return clamp(round(src / scale) + zero_point, low, high) in dtype; chosen [4] as choose_scale has it."""
    return src.float().mul(chosen[1]).round_().add_(chosen[2]).clamp_(low, high).to(dtype)


@op(kind=COMPUTE, post_ops=True, shape="rank")
def dynamic_linear(
    src: Tensor, chosen: Tensor, weight: Tensor, bias: Tensor | None = None, *, post_ops: PostOps = ()
) -> Tensor:
    """Return post_ops(real @ weight.T + bias), where real = (src - zero_point) * scale.

    src [..., K] of uint8 or int8, chosen [4] as choose_scale has it, weight [N, K], bias [N]
    """
    real = src.to(weight.dtype).sub_(chosen[2]).mul_(chosen[0])
    return apply_post_ops(F.linear(real, weight, bias), post_ops)
