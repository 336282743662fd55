"""Over spatial windows: convolutions, pooling, resampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from fx_passes.ops.pointwise import PostOps, apply_post_ops
from fx_passes.ops.registry import COMPUTE, op

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


_DECONV = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


_MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


_AVG_POOL = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


_ADAPTIVE_POOL = {
    "avg": {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d},
    "max": {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d},
}


def borders(padding_l: Sequence[int], padding_r: Sequence[int]) -> list[int]:
    """F.pad's argument for per-dimension paddings: last dimension first."""
    return [p for pair in zip(reversed(padding_l), reversed(padding_r), strict=True) for p in pair]


@op(kind=COMPUTE, post_ops=True, shape="rank", weighted=True, windows=True, per_sample=True)
def convolution(
    src: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, ...],
    padding_l: tuple[int, ...],
    padding_r: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    post_ops: PostOps = (),
) -> Tensor:
    """Return post_ops(conv(src, weight) + bias) with zero padding, in 1, 2 or 3 spatial dimensions.

    src [N, C, *spatial] (or without N), weight [O, C / groups, *kernel], bias [O]; dilation 1 is dense.
    """
    conv = _CONV[len(stride)]
    if padding_l != padding_r:
        src, padding_l = F.pad(src, borders(padding_l, padding_r)), (0,) * len(stride)
    return apply_post_ops(conv(src, weight, bias, stride, padding_l, dilation, groups), post_ops)


@op(kind=COMPUTE, post_ops=True, shape="rank", weighted=True, windows=True, per_sample=True, torch_candidate=True)
def deconvolution(
    src: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    output_padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    post_ops: PostOps = (),
) -> Tensor:
    """Return post_ops(conv_transpose(src, weight) + bias); weight [C, O / groups, *kernel] as PyTorch keeps it."""
    deconv = _DECONV[len(stride)]
    return apply_post_ops(deconv(src, weight, bias, stride, padding, output_padding, groups, dilation), post_ops)


@op(kind=COMPUTE, shape="rank", windows=True, per_sample=True, torch_candidate=True)
def pool(
    src: Tensor,
    kind: str,
    *,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding_l: tuple[int, ...],
    padding_r: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: bool,
) -> Tensor:
    """Return windows of src pooled; kind "max", "avg_include_padding" or "avg_exclude_padding".

    Unequal paddings only with "avg_include_padding" and without ceil_mode (that is what folding a pad produces);
    dilation other than 1 only with "max".
    """
    if kind == "max":
        return _MAX_POOL[len(kernel)](src, kernel, stride, padding_l, dilation, ceil_mode)
    if padding_l != padding_r:
        src, padding_l = F.pad(src, borders(padding_l, padding_r)), (0,) * len(kernel)
    return _AVG_POOL[len(kernel)](src, kernel, stride, padding_l, ceil_mode, kind == "avg_include_padding")


@op(kind=COMPUTE, shape="rank", windows=True, per_sample=True, torch_candidate=True)
def adaptive_pool(src: Tensor, kind: str, output_size: tuple[int | None, ...]) -> Tensor:
    """Return src pooled ("avg" or "max") to output_size, one entry per spatial dimension; None keeps the input's."""
    function: Callable[..., Tensor] = _ADAPTIVE_POOL[kind][len(output_size)]
    return function(src, output_size if len(output_size) > 1 else output_size[0])


@op(kind=COMPUTE, shape="rank", per_sample=True, torch_candidate=True, sizes_at=2)
def resample(
    src: Tensor,
    kind: str,
    size: tuple[int, ...] | int | None,
    scale_factor: tuple[float, ...] | float | None,
    align_corners: bool = False,
) -> Tensor:
    """Return src interpolated; kind is F.interpolate's mode: "nearest", or linear in 1, 2 or 3 dimensions ("linear",
    "bilinear", "trilinear"; half-pixel centres where not align_corners).
    """
    return F.interpolate(src, size, scale_factor, kind, align_corners or None)
