"""TensorSpec: what is known of a tensor before it exists; and the strides that PyTorch gives to results."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fx_passes.candidates.layouts import contiguous_strides
from zendnn_cffi.values import dataclass

_LAST_2D, _LAST_3D = (1, 3, 2, 0), (1, 4, 3, 2, 0)  # dimensions of channels-last layouts, innermost first


class Unclear(Exception):
    """No rule tells what an operation makes of these operands: its plain-torch body has to."""


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before it exists: shape, dtype, and the strides (elements) eager would give it.

    grows  whether another call with the same signature may have another shape, which nothing may depend on
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    grows: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


def row_major(shape: Sequence[int], dtype: torch.dtype) -> TensorSpec:
    """The spec of a new tensor in PyTorch's default strides."""
    return TensorSpec(tuple(shape), dtype, contiguous_strides(tuple(shape)))


def is_row_major(spec: TensorSpec) -> bool:
    """Whether the strides are those of a new tensor, also of dimensions of size 1, where they do not count."""
    return spec.strides == contiguous_strides(spec.shape)


def in_order(shape: Sequence[int], dtype: torch.dtype, innermost_first: Sequence[int]) -> TensorSpec:
    """The spec of a new dense tensor with its dimensions in this order."""
    strides, step = [0] * len(shape), 1
    for dim in innermost_first:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return TensorSpec(tuple(shape), dtype, tuple(strides))


def channels_last(shape: Sequence[int], dtype: torch.dtype) -> TensorSpec:
    """The spec of a new channels-last tensor of 4 or 5 dimensions."""
    return in_order(shape, dtype, _LAST_2D if len(shape) == 4 else _LAST_3D)


def looks_channels_last(spec: TensorSpec) -> bool:
    """As c10::is_channels_last_strides_2d and _3d: Tensor.suggest_memory_format() would be channels last."""
    if spec.ndim not in (4, 5) or spec.strides[1] == 0:
        return False
    least = 0
    for dim in _LAST_2D if spec.ndim == 4 else _LAST_3D:
        if spec.shape[dim] == 0 or spec.strides[dim] < least or (dim == 0 and least == spec.strides[1]):
            return False
        least = spec.strides[dim] * max(spec.shape[dim], 1)
    return True


def like(spec: TensorSpec, shape: Sequence[int]) -> TensorSpec:
    """The spec of a new tensor in the memory format that `spec` suggests."""
    if looks_channels_last(spec):
        return channels_last(shape, spec.dtype)
    return row_major(shape, spec.dtype)


def plain(spec: TensorSpec) -> TensorSpec:
    """The spec itself, if it is a new tensor's, row-major or channels last. Raises Unclear."""
    if spec != like(spec, spec.shape):
        raise Unclear
    return spec


def check_dim(spec: TensorSpec, *dims: int) -> None:
    """Raise Unclear for a dimension that the tensor does not have."""
    if not all(-spec.ndim <= dim < spec.ndim for dim in dims):
        raise Unclear


def settled(*specs: TensorSpec) -> None:
    """Raise Unclear where sizes of 1 have strides of their own: PyTorch's ways to a result differ in what they mean."""
    for spec in specs:
        if 1 in spec.shape:
            plain(spec)


def is_contiguous(spec: TensorSpec) -> bool:
    """As Tensor.is_contiguous(): strides of dimensions of size 1 do not count."""
    return _steps_through(spec, range(spec.ndim - 1, -1, -1))


def is_channels_last(spec: TensorSpec) -> bool:
    """As Tensor.is_contiguous(memory_format=torch.channels_last): false for other than 4 dimensions."""
    return spec.ndim == 4 and _steps_through(spec, _LAST_2D)


def _steps_through(spec: TensorSpec, innermost_first: Sequence[int]) -> bool:
    step = 1
    for dim in innermost_first:
        if spec.shape[dim] != 1:
            if spec.strides[dim] != step:
                return False
            step *= spec.shape[dim]
    return True
