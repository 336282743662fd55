"""Over spatial windows. Memory formats are the operand's, of convolutions those that PyTorch's CPU kernels choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fx_passes.candidates.shapes.elementwise import check_floating
from fx_passes.candidates.shapes.spec import (
    TensorSpec,
    Unclear,
    channels_last,
    is_row_major,
    like,
    looks_channels_last,
    plain,
    row_major,
)
from fx_passes.ops.windows import borders


def padded(src: TensorSpec, padding: Sequence[int], value: float = 0.0) -> TensorSpec:
    """ops.pad: padding as F.pad's, last dimension first."""
    shape = list(src.shape)
    for place in range(len(padding) // 2):
        shape[-1 - place] += padding[2 * place] + padding[2 * place + 1]
    if len(padding) > 2 * src.ndim or min(shape) < 1:
        raise Unclear
    return like(src, shape)


def _with_borders(src: TensorSpec, padding_l: tuple[int, ...], padding_r: tuple[int, ...]) -> TensorSpec:
    return padded(src, borders(padding_l, padding_r))


def convolution(
    src: TensorSpec,
    weight: TensorSpec,
    bias: TensorSpec | None = None,
    *,
    stride: tuple[int, ...],
    padding_l: tuple[int, ...],
    padding_r: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    post_ops: Any = (),
) -> TensorSpec:
    """ops.convolution of a batch."""
    spatial = len(stride)
    check_floating(src, weight)
    if src.ndim != spatial + 2 or weight.ndim != src.ndim or src.shape[1] != weight.shape[1] * groups:
        raise Unclear
    if padding_l != padding_r:
        src, padding_l = _with_borders(src, padding_l, padding_r), (0,) * spatial
    shape = [src.shape[0], weight.shape[0]]
    for size, kernel, step, border, spread in zip(
        src.shape[2:], weight.shape[2:], stride, padding_l, dilation, strict=True
    ):
        shape.append((size + 2 * border - spread * (kernel - 1) - 1) // step + 1)
    if min(shape) < 1:
        raise Unclear
    options = {
        "stride": stride,
        "padding": padding_l,
        "dilation": dilation,
        "output_padding": (0,) * spatial,
        "groups": groups,
    }
    return _as_convolved(src, weight, bias, shape, transposed=False, **options)


def deconvolution(
    src: TensorSpec,
    weight: TensorSpec,
    bias: TensorSpec | None = None,
    *,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    output_padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    post_ops: Any = (),
) -> TensorSpec:
    """ops.deconvolution of a batch."""
    check_floating(src, weight)
    if src.ndim != len(stride) + 2 or weight.ndim != src.ndim or src.shape[1] != weight.shape[0]:
        raise Unclear
    shape = [src.shape[0], weight.shape[1] * groups]
    sizes = zip(src.shape[2:], weight.shape[2:], stride, padding, output_padding, dilation, strict=True)
    for size, kernel, step, border, extra, spread in sizes:
        shape.append((size - 1) * step - 2 * border + spread * (kernel - 1) + extra + 1)
    if min(shape) < 1:
        raise Unclear
    options = {
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "output_padding": output_padding,
        "groups": groups,
    }
    return _as_convolved(src, weight, bias, shape, transposed=True, **options)


def _as_convolved(
    src: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, shape: Sequence[int], **options: Any
) -> TensorSpec:
    """The result in row-major order, if neither operand says channels last; else PyTorch's own choice for its kernels.

    It chooses by tensors on the CPU, whose memory nobody touches here.
    """
    if is_row_major(src) and is_row_major(weight) and not looks_channels_last(src) and not looks_channels_last(weight):
        return row_major(shape, src.dtype)
    if src.ndim != 4:
        raise Unclear
    tensors = [None if spec is None else _untouched(spec) for spec in (src, weight, bias)]
    try:
        backend = torch._C._select_conv_backend(*tensors, **options)
        memory_format = torch._C._conv_determine_backend_memory_format(*tensors[:2], backend)
    except (AttributeError, TypeError):  # private functions, which another PyTorch may have changed
        raise Unclear from None
    result = row_major(shape, src.dtype)
    if memory_format is torch.channels_last and not looks_channels_last(result):
        return channels_last(shape, src.dtype)
    return result


def _untouched(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="cpu")


def pool(
    src: TensorSpec,
    kind: str,
    *,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding_l: tuple[int, ...],
    padding_r: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: bool,
) -> TensorSpec:
    """ops.pool of a batch of images."""
    check_floating(src)
    if plain(src).ndim != 4 or len(kernel) != 2:
        raise Unclear
    if padding_l != padding_r:
        src, padding_l = _with_borders(src, padding_l, padding_r), (0, 0)
    shape = [*src.shape[:2]]
    for size, window, step, border, spread in zip(src.shape[2:], kernel, stride, padding_l, dilation, strict=True):
        shape.append(_pooled(size, window, step, border, spread, ceil_mode))
    if min(shape) < 1 or any(2 * border > window for border, window in zip(padding_l, kernel, strict=True)):
        raise Unclear
    return like(src, shape)


def _pooled(size: int, window: int, step: int, border: int, spread: int, ceil_mode: bool) -> int:
    """The size of a pooled dimension: a last window that starts in the border behind does not count."""
    reach = size + 2 * border - spread * (window - 1) - 1
    count = (reach + (step - 1 if ceil_mode else 0)) // step + 1
    return count - 1 if ceil_mode and (count - 1) * step >= size + border else count


def adaptive_pool(src: TensorSpec, kind: str, output_size: tuple[int | None, ...]) -> TensorSpec:
    """ops.adaptive_pool of a batch of images."""
    check_floating(src)
    if plain(src).ndim != 4 or len(output_size) != 2:
        raise Unclear
    sizes = (size if wanted is None else wanted for wanted, size in zip(output_size, src.shape[2:], strict=True))
    return like(src, (*src.shape[:2], *sizes))


def resample(
    src: TensorSpec,
    kind: str,
    size: tuple[int, ...] | int | None,
    scale_factor: tuple[float, ...] | float | None,
    align_corners: bool = False,
) -> TensorSpec:
    """ops.resample of a batch of images to a stated size, or by whole factors."""
    check_floating(src)
    if src.ndim != 4 or kind not in ("nearest", "bilinear") or not is_row_major(src) or looks_channels_last(src):
        raise Unclear
    if size is not None:
        sizes = size if isinstance(size, tuple) else (size, size)
    else:
        factors = scale_factor if isinstance(scale_factor, tuple) else (scale_factor, scale_factor)
        if any(factor is None or factor != int(factor) for factor in factors):
            raise Unclear
        sizes = tuple(int(n * factor) for n, factor in zip(src.shape[2:], factors, strict=True) if factor is not None)
    if len(sizes) != 2 or not all(isinstance(n, int) for n in sizes):
        raise Unclear
    return row_major((*src.shape[:2], *sizes), src.dtype)


def weighted_samples(
    maps: Sequence[TensorSpec], grids: Sequence[TensorSpec], weights: TensorSpec, align_corners: bool = False
) -> TensorSpec:
    """ops.weighted_samples of [N, D, h, w] each."""
    check_floating(*maps, *grids, weights)
    samples, width = maps[0].shape[:2]
    queries, points = grids[0].shape[1], sum(grid.shape[2] for grid in grids)
    fits = all(each.ndim == 4 and each.shape[:2] == (samples, width) for each in maps)
    fits = fits and all(each.ndim == 4 and each.shape[:2] == (samples, queries) for each in grids)
    if not fits or len(maps) != len(grids) or weights.shape != (samples, 1, queries, points):
        raise Unclear
    if any(grid.shape[3] != 2 for grid in grids):
        raise Unclear
    return row_major((samples, width, queries), maps[0].dtype)
