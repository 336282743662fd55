"""Element by element: eltwise, binary, prelu and what is made of them. Strides as eager PyTorch's are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fx_passes import ops
from fx_passes.candidates.shapes.spec import (
    TensorSpec,
    Unclear,
    channels_last,
    in_order,
    is_channels_last,
    is_contiguous,
    is_row_major,
    looks_channels_last,
    row_major,
    settled,
)
from fx_passes.ops.quantized import count_of_chosen

_FUNCTIONAL = ("add", "sub", "mul")  # kinds whose operands are looked at before they are broadcast


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an element-wise result. Raises Unclear where eager would refuse."""
    result: list[int] = []
    for place in range(1, max(map(len, shapes)) + 1):
        sizes = {shape[-place] for shape in shapes if place <= len(shape)} - {1}
        if len(sizes) > 1:
            raise Unclear
        result.append(sizes.pop() if sizes else 1)
    return tuple(reversed(result))


def expanded(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    """As Tensor.expand: dimensions that are repeated have stride 0."""
    if spec.shape == shape:
        return spec
    missing = len(shape) - spec.ndim
    strides = [0] * missing
    for size, step, wanted in zip(spec.shape, spec.strides, shape[missing:], strict=True):
        strides.append(step if size == wanted else 0)
    if missing:  # those in front lie behind each other, as far as nothing is repeated
        for dim in range(missing - 1, -1, -1):
            strides[dim] = strides[dim + 1] * shape[dim + 1] if shape[dim] == 1 else 0
    return TensorSpec(shape, spec.dtype, tuple(strides))


def elementwise(*operands: TensorSpec) -> TensorSpec:
    """The result of a function of operands of one shape and dtype, element by element."""
    first = operands[0]
    settled(*(operand for operand in operands if 0 not in operand.strides))
    if first.ndim < 2:
        return row_major(first.shape, first.dtype)
    plain, last = all(map(is_contiguous, operands)), all(map(is_channels_last, operands))
    if plain and not last:
        return row_major(first.shape, first.dtype)
    if last and not plain:
        return channels_last(first.shape, first.dtype)
    return in_order(first.shape, first.dtype, innermost_first(first.shape, [spec.strides for spec in operands]))


def innermost_first(shape: tuple[int, ...], strides: Sequence[tuple[int, ...]]) -> list[int]:
    """The order of the result's dimensions, as TensorIterator sorts them: by the strides of the first that tells."""

    def at_least(a: int, b: int) -> bool:
        return b == 0 or (a != 0 and (a >= b or a % b == 0))

    def compare(a: int, b: int) -> int:
        for steps in strides:
            if steps[a] == 0 or steps[b] == 0:
                continue
            if steps[a] == steps[b]:
                if at_least(shape[b], shape[a]):
                    continue
                return 1
            return -1 if at_least(steps[b], steps[a]) else 1
        return 0

    order = list(reversed(range(len(shape))))
    for i in range(1, len(order)):
        place = i
        for other in reversed(range(i)):
            found = compare(order[other], order[place])
            if found > 0:
                order[other], order[place] = order[place], order[other]
                place = other
            elif found < 0:
                break
    return order


def check_floating(*specs: TensorSpec) -> None:
    """Raise Unclear unless all have one floating-point dtype: others may be promoted."""
    if not specs[0].dtype.is_floating_point or any(spec.dtype != specs[0].dtype for spec in specs):
        raise Unclear


def eltwise(src: TensorSpec, kind: str, alpha: float = 0.0, beta: float = 0.0) -> TensorSpec:
    """ops.eltwise: whatever a kind is computed of, the strides are those of one function."""
    check_floating(src)
    return elementwise(src)


def binary(a: Any, b: Any, kind: str) -> Any:
    """ops.binary: of two tensors, of a tensor and a number, or of numbers."""
    specs = [side for side in (a, b) if isinstance(side, TensorSpec)]
    if not specs:
        return ops.BINARY[kind](a, b)
    if len(specs) == 1:
        number = b if isinstance(a, TensorSpec) else a
        if type(number) not in (int, float, bool):
            raise Unclear
        return eltwise(specs[0], "linear")
    check_floating(*specs)
    shape = broadcast(a.shape, b.shape)
    if shape not in (a.shape, b.shape) or not shape or not all(spec.ndim for spec in specs):
        raise Unclear
    settled(*specs)
    if 1 in shape and not (all(map(is_row_major, specs)) or all(map(looks_channels_last, specs))):
        raise Unclear
    if kind in _FUNCTIONAL:
        if all(map(is_contiguous, specs)):
            return row_major(shape, a.dtype)
        if all(map(is_channels_last, specs)):
            return channels_last(shape, a.dtype)
    return elementwise(*(expanded(spec, shape) for spec in specs))


def prelu(src: TensorSpec, weight: TensorSpec) -> TensorSpec:
    """ops.prelu."""
    check_floating(src, weight)
    return eltwise(src, "relu")


def quantized(src: TensorSpec, scale: Any, zero_point: Any, axis: Any, *rest: Any, **known: Any) -> TensorSpec:
    """ops.quantize and ops.dequantize of whole tensors or their channels."""
    if isinstance(axis, str) or (axis is not None and not is_row_major(src)):
        raise Unclear  # scales of rows may broadcast, and promote
    if axis is not None and src.shape and src.shape[axis] == 1:
        raise Unclear  # one channel of several scales becomes several
    if not is_row_major(src) and is_contiguous(src):
        raise Unclear  # sizes of 1 have strides of their own
    return replace(elementwise(src), dtype=rest[-1])


def chosen_scale(src: TensorSpec, *rest: Any, of: torch.dtype | None = None) -> TensorSpec:
    """ops.choose_scale."""
    if of not in (None, src.dtype):
        raise Unclear
    return row_major((4,), torch.float32)


def chosen_row_scales(src: TensorSpec, how: str, *rest: Any, of: torch.dtype | None = None) -> TensorSpec:
    """ops.choose_row_scales."""
    if of not in (None, src.dtype):
        raise Unclear
    return row_major((count_of_chosen(how), *src.shape[:-1], 1), torch.float32)


def quantized_rows_by(src: TensorSpec, chosen: TensorSpec, *rest: Any) -> TensorSpec:
    """ops.quantize_rows_by and ops.dequantize_rows_by of dense rows, by scales that lie as they were chosen."""
    if not is_row_major(src) or not is_row_major(chosen) or chosen.shape[1:] != (*src.shape[:-1], 1):
        raise Unclear
    return row_major(src.shape, rest[-1])


def quantized_by(src: TensorSpec, chosen: TensorSpec, *rest: Any) -> TensorSpec:
    """ops.quantize_by."""
    return replace(elementwise(src), dtype=rest[-1])


def after_post_ops(base: TensorSpec, post_ops: Sequence[tuple[Any, ...]]) -> TensorSpec:
    """ops.apply_post_ops."""
    return functools.reduce(_after, post_ops, base)


def _after(spec: TensorSpec, entry: tuple[Any, ...]) -> TensorSpec:
    match entry:
        case ("eltwise", kind, *_):
            return eltwise(spec, kind)
        case ("binary", kind, other):
            return binary(spec, other, kind)
        case ("binary", kind, other, True):
            return binary(other, spec, kind)
        case ("prelu", weight):
            return prelu(spec, weight)
    raise Unclear


def rotary(src: TensorSpec, cos: TensorSpec, sin: TensorSpec, interleaved: bool = False) -> TensorSpec:
    """ops.rotary."""
    if src.ndim < 2 or src.shape[-1] % 2:
        raise Unclear
    turned = row_major(src.shape, src.dtype)
    if not is_contiguous(src):
        raise Unclear
    return binary(binary(src, cos, "mul"), binary(turned, sin, "mul"), "add")


def scaled(weight: TensorSpec, *others: Any) -> TensorSpec:
    """A constant operation that changes a weight's numbers alone, in float64 and back."""
    if not is_row_major(weight):
        raise Unclear
    return weight
