"""Numbers kept as integers: kept = round(value / scale) + zero_point, value = (kept - zero_point) * scale.

scale and zero_point are numbers or tensors, and axis says what they belong to:
    None     the whole tensor
    a dim    each index of that dimension, [size of it]
    TOKEN    each row along the last dimension, [..., 1]
    sizes    each block of these sizes, one for each dimension; scales in row-major order of the blocks
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_passes.ops.pointwise import PostOps, apply_post_ops
from fx_passes.ops.registry import COMPUTE, op
from zendnn_cffi.runtime.packed_int4 import block_here, packed_again

TOKEN = "token"
Axis = int | str | tuple[int, ...] | None
ASYMMETRIC = ("asymmetric", "nearest")  # ways to choose by rows in which each row has a zero point of its own


def blocked(sizes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Shapes that show a tensor and its scales by blocks: [2, 6] in blocks of [1, 3] is [2, 2, 3], scales [2, 2, 1].

    Raises ValueError where the blocks do not fill the tensor.
    """
    if len(sizes) != len(shape) or any(n % size for n, size in zip(shape, sizes, strict=True)):
        raise ValueError(f"a tensor of shape {list(shape)} does not consist of blocks of {list(sizes)}")
    seen: list[int] = []
    scales: list[int] = []
    for n, size in zip(shape, sizes, strict=True):
        if size in (1, n):
            seen.append(n)
            scales.append(n // size)
        else:
            seen += [n // size, size]
            scales += [n // size, 1]
    return seen, scales


def plain_axis(axis: Axis, shape: tuple[int, ...]) -> Axis:
    """Sizes of blocks as one of the other axes where they are one: None or a dimension."""
    if not isinstance(axis, tuple) or len(axis) != len(shape):
        return axis
    parts = [dim for dim, (n, size) in enumerate(zip(shape, axis, strict=True)) if size != n]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 and axis[parts[0]] == 1 else axis


def _along(values: Any, axis: Axis, ndim: int) -> Any:
    """Scales or zero points, shaped to broadcast over a tensor of ndim dimensions."""
    if axis is None and isinstance(values, Tensor):
        return values.reshape(())
    if isinstance(axis, int) and values is not None:
        return values.reshape([-1 if dim == axis % ndim else 1 for dim in range(ndim)])
    return values


@op(kind=COMPUTE, light=True, opens_region=False, shape="same", shares_memory=True)
def quantize(
    src: Tensor,
    scale: Any,
    zero_point: Any,
    axis: Axis,
    low: Any,
    high: Any,
    dtype: torch.dtype,
    *,
    is_within: bool = False,
) -> Tensor:
    """Return clamp(round(src / scale) + zero_point, low, high) in dtype; with TOKEN it adds before it rounds.

    is_within  src is known to be between the limits: they need not be looked at
    """
    if axis == TOKEN:
        return src.mul(1.0 / scale).add(zero_point).round().clamp(low, high).to(dtype)
    if isinstance(axis, tuple):
        seen, scales = blocked(axis, tuple(src.shape))
        rounded = torch.round(src.view(seen) * (1.0 / scale.view(scales)))
        return torch.clamp(rounded + zero_point.view(scales), low, high).view(src.shape).to(dtype)
    values = src.float() if src.dtype in (torch.float16, torch.bfloat16) else src
    inverse, shift = 1.0 / _along(scale, axis, src.ndim), _along(zero_point, axis, src.ndim)
    return torch.clamp(torch.round(values * inverse) + shift, low, high).to(dtype)


@op(kind=COMPUTE, light=True, opens_region=False, shape="same", shares_memory=True)
def dequantize(src: Tensor, scale: Any, zero_point: Any, axis: Axis, dtype: torch.dtype) -> Tensor:
    """Return (src - zero_point) * scale in dtype; zero_point None: nothing is subtracted."""
    if isinstance(axis, tuple):
        seen, scales = blocked(axis, tuple(src.shape))
        wide = src.view(seen).to(dtype)
        wide = wide if zero_point is None else wide - zero_point.view(scales).to(dtype)
        return (wide * scale.view(scales)).view(src.shape).to(dtype)
    factor, shift = _along(scale, axis, src.ndim), _along(zero_point, axis, src.ndim)
    kept = src.to(dtype) if axis is None else src
    return ((kept if shift is None else kept - shift) * factor).to(dtype)


@op(kind=COMPUTE, light=True, opens_region=False)
def choose_scale(
    src: Tensor, low: int, high: int, eps: float, dtype: torch.dtype, symmetric: bool, *, of: torch.dtype | None = None
) -> Tensor:
    """Return how src is quantized as a whole, as operators choose_qparams of quantized_decomposed choose it.

    src      float32 [...], not empty
    of       the dtype that src must have; None: any
    Returns  float32 [4]: scale, 1 / scale, zero point, and the bits of the zero point as an int32
    """
    _check_dtype(src, of)
    import torch.ao.quantization.fx._decomposed  # registers the operators

    form = "choose_qparams_symmetric" if symmetric else "choose_qparams"
    scale, zero_point = getattr(torch.ops.quantized_decomposed, form).tensor(src, low, high, eps, dtype)
    numbers = [number.to(torch.float32) for number in (scale, 1.0 / scale, zero_point)]
    return torch.cat([*numbers, zero_point.to(torch.int32).view(torch.float32)])


@op(kind=COMPUTE, light=True, opens_region=False, shape="same")
def quantize_by(src: Tensor, chosen: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Return clamp(round(src / scale) + zero_point, low, high) in dtype; chosen [4] as choose_scale has it."""
    return src.float().mul(chosen[1]).round_().add_(chosen[2]).clamp_(low, high).to(dtype)


@op(kind=COMPUTE, light=True, opens_region=False)
def choose_row_scales(
    src: Tensor, how: str, low: int, high: int, eps: float, *, of: torch.dtype | None = None
) -> Tensor:
    """Return how each row of src along its last dimension is quantized.

    src      float32 or bf16 [..., K], K > 0; scales are rounded to its dtype
    how      "largest": scale max(|x|) / high, as choose_qparams_per_token
             "symmetric", "asymmetric": as choose_qparams_affine
             "nearest": as choose_qparams_per_token_asymmetric
    of       the dtype that src must have; None: any
    Returns  float32 [3, ..., 1]: scales, 1 / scales, zero points; [2, ..., 1] where these are 0
    """
    _check_dtype(src, of)
    lowest, highest = src.amin(-1, keepdim=True).clamp(max=0), src.amax(-1, keepdim=True).clamp(min=0)
    largest = torch.maximum(-lowest, highest)
    if how in ASYMMETRIC:
        scale = (highest - lowest).div(high - low).clamp(min=eps)
        zero_point = row_zero_points(how, lowest / scale, highest / scale, low, high)
        return torch.stack((scale.float(), 1.0 / scale.float(), zero_point.float()))
    scale = largest.clamp(min=eps).div(high) if how == "largest" else largest.div((high - low) / 2).clamp(min=eps)
    return torch.stack((scale.float(), 1.0 / scale.float()))


def count_of_chosen(how: str) -> int:
    """How many numbers choose_row_scales returns for each row."""
    return 3 if how in ASYMMETRIC else 2


def _check_dtype(src: Tensor, wanted: torch.dtype | None) -> None:
    """Raise TypeError for another dtype: a layer whose result has the dtype of its input is a graph for one."""
    if wanted is not None and src.dtype != wanted:
        raise TypeError(f"a quantized layer of {wanted} is given {src.dtype}: convert what it is given, or the layer")


def row_zero_points(how: str, lowest: Tensor, highest: Tensor, low: int, high: int) -> Tensor:
    """The zero points of rows whose smallest and largest values are these, in steps."""
    if how == "asymmetric":
        return lowest.round().neg_().add_(low).clamp_(low, high)
    from_lowest = low + lowest + high + highest > 0  # the end whose error is smaller stays exact
    return torch.where(from_lowest, low - lowest, high - highest).clamp_(low, high).round_()


@op(kind=COMPUTE, light=True, opens_region=False, shape="same")
def quantize_rows_by(src: Tensor, chosen: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Return clamp(round(src / scale + zero_point), low, high) in dtype; chosen as choose_row_scales has it."""
    steps = src.float().mul(chosen[1])
    return (steps.add_(chosen[2]) if len(chosen) > 2 else steps).round_().clamp_(low, high).to(dtype)


@op(kind=COMPUTE, light=True, opens_region=False, shape="same")
def dequantize_rows_by(src: Tensor, chosen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (src - zero_points) * scales in dtype; chosen as choose_row_scales has it."""
    steps = src.to(dtype)
    return (steps.sub_(chosen[2]) if len(chosen) > 2 else steps).mul_(chosen[0])


@op(kind=COMPUTE, light=True, opens_region=False, shape="same", no_rule="PyTorch rounds each step to bf16")
def rounded_rows(src: Tensor, how: str, low: int, high: int, eps: float, *, of: torch.dtype | None = None) -> Tensor:
    """Return what rows of src are after they were quantized and dequantized, each step rounded to their dtype.

    how, of  as choose_row_scales has them; how is "asymmetric"
    """
    scale, _, zero_point = choose_row_scales(src, how, low, high, eps, of=of).to(src.dtype)
    kept = src.mul(1.0 / scale).round_().add_(zero_point).clamp_(low, high)
    return kept.sub_(zero_point).mul_(scale)


@op(kind=COMPUTE, post_ops=True, shape="rank", row_major=True)
def row_scaled_linear(
    src: Tensor,
    chosen: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    post_ops: PostOps = (),
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return post_ops(real @ weight.T + bias), where real = (src - zero_points) * scales.

    src [..., K] of uint8 or int8, chosen [2 or 3, ..., 1] as choose_row_scales has it, weight [N, K], bias [N]

    dtype  what the sum is rounded to before post_ops; None: it has weight's
    """
    real = dequantize_rows_by(src, chosen, weight.dtype)
    found = F.linear(real, weight, bias if bias is None else bias.to(weight.dtype))
    return apply_post_ops(found if dtype is None else found.to(dtype), post_ops)


@op(kind=COMPUTE, post_ops=True, shape="rank", row_major=True)
def dynamic_linear(
    src: Tensor, chosen: Tensor, weight: Tensor, bias: Tensor | None = None, *, post_ops: PostOps = ()
) -> Tensor:
    """Return post_ops(real @ weight.T + bias), where real = (src - zero_point) * scale.

    src [..., K] of uint8 or int8, chosen [4] as choose_scale has it, weight [N, K], bias [N]
    """
    real = src.to(weight.dtype).sub_(chosen[2]).mul_(chosen[0])
    return apply_post_ops(F.linear(real, weight, bias), post_ops)


@op(kind=COMPUTE, shape="rank", per_sample=True, row_major=True)
def int4_linear(
    src: Tensor, packed: Tensor, scales: Tensor, group: int, block: int, bias: Tensor | None = None
) -> Tensor:
    """Return src @ weight.T, and then + bias, as torchao computes it: each is rounded.

    src     [..., K] in the dtype of scales
    packed  uint8 [N, K / 2], as PyTorch packs them in blocks of `block` (zendnn_cffi.runtime.packed_int4)
    scales  [K / group, N, 2]: scale and zero
    """
    if block != block_here():
        packed = packed_again(packed, block)
    rows = src.reshape(-1, src.shape[-1]).contiguous()
    found = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, group, scales)
    found = found.view(*src.shape[:-1], packed.shape[0])
    return found if bias is None else found.add_(bias)
