"""Moving data: views of a tensor without memory, which PyTorch makes, and concatenations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fx_passes import ops
from fx_passes.candidates.shapes.spec import (
    TensorSpec,
    Unclear,
    channels_last,
    check_dim,
    is_contiguous,
    is_row_major,
    like,
    looks_channels_last,
    plain,
    row_major,
    settled,
)


def viewed(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of an operation whose body only ever makes views."""

    def rule(src: TensorSpec, *args: Any, **kwargs: Any) -> Any:
        result = operation(_without_memory(src), *args, **kwargs)
        return TensorSpec.of(result) if isinstance(result, torch.Tensor) else tuple(map(TensorSpec.of, result))

    return rule


def _without_memory(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")


def _reshaped(src: TensorSpec, shape: Sequence[int]) -> TensorSpec:
    """A view where there is one; else a copy, row by row."""
    try:
        view = TensorSpec.of(_without_memory(src).view(tuple(shape)))
    except RuntimeError:
        whole = _without_memory(row_major(src.shape, src.dtype)).view(tuple(shape))  # whatever it refuses, goes out
        return TensorSpec.of(whole)
    settled(src)
    return view


def reshape(src: TensorSpec, shape: Sequence[int]) -> TensorSpec:
    """ops.reshape."""
    return _reshaped(src, shape)


def reshape_as(src: TensorSpec, like: TensorSpec) -> TensorSpec:
    """ops.reshape_as."""
    return _reshaped(src, like.shape)


def flatten(src: TensorSpec, start_dim: int = 0, end_dim: int = -1) -> TensorSpec:
    """ops.flatten."""
    if not src.ndim:
        raise Unclear
    start, end = start_dim % src.ndim, end_dim % src.ndim
    if start >= end:
        return src
    return _reshaped(src, (*src.shape[:start], -1, *src.shape[end + 1 :]))


def unflatten(src: TensorSpec, dim: int, sizes: Sequence[int]) -> TensorSpec:
    """ops.unflatten. Of sizes 1, PyTorch's ways to a view differ in what they make of strides."""
    if 1 in src.shape and not is_row_major(src):
        raise Unclear
    dim %= src.ndim
    return _reshaped(src, (*src.shape[:dim], *sizes, *src.shape[dim + 1 :]))


def contiguous(src: TensorSpec) -> TensorSpec:
    """ops.contiguous."""
    return src if is_contiguous(src) else row_major(src.shape, src.dtype)


def concat(srcs: Sequence[TensorSpec], dim: int) -> TensorSpec:
    """ops.concat of pieces that all lie alike."""
    first = srcs[0]
    check_dim(first, dim)
    dim %= first.ndim
    others = {(src.shape[:dim], src.shape[dim + 1 :], src.dtype) for src in srcs}
    if len(others) != 1:
        raise Unclear
    shape = (*first.shape[:dim], sum(src.shape[dim] for src in srcs), *first.shape[dim + 1 :])
    if not any(map(looks_channels_last, srcs)):
        return row_major(shape, first.dtype)
    return like(first, shape) if all(map(looks_channels_last, map(plain, srcs))) else row_major(shape, first.dtype)


def roll(src: TensorSpec, shifts: Sequence[int], dims: Sequence[int]) -> TensorSpec:
    """ops.roll: the concatenation of both parts, dimension by dimension."""
    for shift, dim in zip(shifts, dims, strict=True):
        check_dim(src, dim)
        start = shift % (src.shape[dim % src.ndim] or 1)
        if not start:
            raise Unclear
        parts = [viewed(ops.narrow)(src, dim, *part) for part in ((-start, None), (None, -start))]
        lies_last = all(map(looks_channels_last, parts))
        src = channels_last(src.shape, src.dtype) if lies_last else row_major(src.shape, src.dtype)
    return src


def grow(cache: TensorSpec, new: TensorSpec, dim: int) -> TensorSpec:
    """ops.grow."""
    return concat((cache, new), dim)


def write_at(cache: TensorSpec, index: TensorSpec, new: TensorSpec, dim: int) -> TensorSpec:
    """ops.write_at."""
    check_dim(cache, dim)
    written = list(cache.shape)
    written[dim] = index.shape[0]
    if index.ndim != 1 or index.dtype != torch.int64 or new.shape != tuple(written) or new.dtype != cache.dtype:
        raise Unclear
    return cache


VIEWED = (ops.permute, ops.transpose, ops.narrow, ops.index, ops.unsqueeze, ops.expand, *ops.PIECES)
