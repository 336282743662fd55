"""Matrix products and attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fx_passes.candidates.shapes.elementwise import check_floating, innermost_first
from fx_passes.candidates.shapes.spec import TensorSpec, Unclear, in_order, row_major, settled


def linear(src: TensorSpec, weight: TensorSpec, bias: TensorSpec | None = None, *, post_ops: Any = ()) -> TensorSpec:
    """ops.linear."""
    check_floating(src, weight, *(() if bias is None else (bias,)))
    if src.ndim < 2 or weight.ndim != 2 or src.shape[-1] != weight.shape[1]:
        raise Unclear
    if bias is not None and bias.shape != weight.shape[:1]:
        raise Unclear
    return row_major((*src.shape[:-1], weight.shape[0]), src.dtype)


def matmul(a: TensorSpec, b: TensorSpec, *, post_ops: Any = ()) -> TensorSpec:
    """ops.matmul of two matrices, or of as many pairs of them."""
    check_floating(a, b)
    if a.ndim < 2 or a.ndim != b.ndim or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise Unclear
    return row_major((*a.shape[:-1], b.shape[-1]), a.dtype)


def attention(
    query: TensorSpec,
    key: TensorSpec,
    value: TensorSpec,
    mask: TensorSpec | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> TensorSpec:
    """ops.attention where PyTorch's fused CPU kernel computes it: the result lies as the query does."""
    specs = (query, key, value)
    check_floating(*specs)
    if any(spec.ndim != 4 or spec.strides[-1] != 1 for spec in specs) or query.dtype == torch.float16:
        raise Unclear
    if len({(*spec.shape[:2], spec.shape[-1]) for spec in specs}) != 1 or key.shape != value.shape:
        raise Unclear
    if enable_gqa or not torch.backends.cuda.flash_sdp_enabled() or (mask is not None and is_causal):
        raise Unclear
    if mask is not None and not _is_mask(mask, query, key):
        raise Unclear
    return _empty_like(query)


def _is_mask(mask: TensorSpec, query: TensorSpec, key: TensorSpec) -> bool:
    """Whether the fused kernel takes the mask: boolean or of the query's dtype, [N or 1, H or 1, L or 1, S or 1]."""
    whole = (*query.shape[:3], key.shape[2])
    fits = mask.ndim == 4 and all(size in (1, most) for size, most in zip(mask.shape, whole, strict=True))
    return fits and mask.dtype in (query.dtype, torch.bool)


def _empty_like(spec: TensorSpec) -> TensorSpec:
    """As torch.empty_like: dense strides in the same order, which equal strides leave open."""
    dense = in_order(spec.shape, spec.dtype, innermost_first(spec.shape, [spec.strides]))
    if dense.strides != spec.strides or len(set(spec.strides)) < spec.ndim:
        settled(spec)
    return dense


def int4_linear(
    src: TensorSpec, packed: TensorSpec, scales: TensorSpec, group: int, block: int, bias: TensorSpec | None = None
) -> TensorSpec:
    """ops.int4_linear."""
    if src.dtype != scales.dtype or src.shape[-1] != 2 * packed.shape[1]:
        raise Unclear
    return row_major((*src.shape[:-1], packed.shape[0]), src.dtype)


def dynamic_linear(
    src: TensorSpec, chosen: TensorSpec, weight: TensorSpec, bias: TensorSpec | None = None, **rest: Any
) -> TensorSpec:
    """ops.dynamic_linear."""
    return linear(replace(src, dtype=weight.dtype), weight, bias, **rest)


def row_scaled_linear(
    src: TensorSpec,
    chosen: TensorSpec,
    weight: TensorSpec,
    bias: TensorSpec | None = None,
    dtype: torch.dtype | None = None,
    **rest: Any,
) -> TensorSpec:
    """ops.row_scaled_linear."""
    found = linear(replace(src, dtype=weight.dtype), weight, bias and replace(bias, dtype=weight.dtype), **rest)
    return found if dtype is None else replace(found, dtype=dtype)
