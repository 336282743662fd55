"""Normalizations, reductions and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fx_passes.candidates.shapes.elementwise import check_floating
from fx_passes.candidates.shapes.spec import (
    TensorSpec,
    Unclear,
    check_dim,
    is_contiguous,
    is_row_major,
    looks_channels_last,
    plain,
    row_major,
)


def _new(src: TensorSpec, *parameters: Any) -> TensorSpec:
    """A new row-major tensor of the operand's shape and dtype, wherever that lies."""
    check_floating(src, *(p for p in parameters if isinstance(p, TensorSpec)))
    return row_major(src.shape, src.dtype)


def batch_norm(
    src: TensorSpec, mean: Any, var: Any, weight: Any, bias: Any, *, eps: float, post_ops: Any = ()
) -> TensorSpec:
    """ops.batch_norm."""
    check_floating(src, *(p for p in (mean, var, weight, bias) if isinstance(p, TensorSpec)))
    return plain(src)


def layer_norm(src: TensorSpec, normalized_shape: Sequence[int], weight: Any, bias: Any, *, eps: float) -> TensorSpec:
    """ops.layer_norm."""
    if tuple(src.shape[-len(normalized_shape) :]) != tuple(normalized_shape):
        raise Unclear
    if is_contiguous(src) and not is_row_major(src):
        raise Unclear
    return _new(src, weight, bias)


def group_norm(src: TensorSpec, groups: int, weight: Any, bias: Any, *, eps: float, post_ops: Any = ()) -> TensorSpec:
    """ops.group_norm."""
    if not is_row_major(src) or looks_channels_last(src):
        raise Unclear
    return _new(src, weight, bias)


def softmax(src: TensorSpec, dim: int, log: bool = False) -> TensorSpec:
    """ops.softmax; its logarithm lies as the operand does."""
    check_dim(src, dim)
    if log and not is_row_major(src):
        raise Unclear
    return _new(src)


def rms_norm(src: TensorSpec, weight: Any, *, eps: float | None, rounds_last: bool = False) -> TensorSpec:
    """ops.rms_norm."""
    if not is_row_major(src) or (isinstance(weight, TensorSpec) and weight.shape != src.shape[-1:]):
        raise Unclear
    return _new(src) if rounds_last else _new(src, weight)


def l2_normalize(src: TensorSpec, dim: int, *, eps: float, of_squares: bool = False) -> TensorSpec:
    """ops.l2_normalize."""
    if not is_row_major(src):
        raise Unclear
    return _new(src)


def reduce(src: TensorSpec, kind: str, dims: tuple[int, ...], keepdim: bool) -> TensorSpec:
    """ops.reduce."""
    check_floating(src)
    if not dims:
        raise Unclear
    check_dim(src, *dims)
    gone = {dim % src.ndim for dim in dims}
    if keepdim:
        return row_major([1 if dim in gone else size for dim, size in enumerate(src.shape)], src.dtype)
    return row_major([size for dim, size in enumerate(src.shape) if dim not in gone], src.dtype)


def take_rows(src: TensorSpec, indices: TensorSpec) -> TensorSpec:
    """ops.take_rows."""
    check_floating(src)
    if src.ndim < 2 or not is_row_major(indices) or indices.dtype not in (torch.int32, torch.int64):
        raise Unclear
    return row_major((*indices.shape, src.shape[-1]), src.dtype)


def embedding(weight: TensorSpec, indices: TensorSpec) -> TensorSpec:
    """ops.embedding."""
    if weight.ndim != 2 or not is_row_major(indices) or indices.dtype not in (torch.int32, torch.int64):
        raise Unclear
    return row_major((*indices.shape, weight.shape[1]), weight.dtype)
