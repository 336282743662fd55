"""Recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fx_passes.candidates.shapes.elementwise import check_floating
from fx_passes.candidates.shapes.spec import TensorSpec, Unclear, row_major
from fx_passes.ops import GATES
from fx_passes.ops.recurrent import misfit, state_offset, state_widths


def recurrent(
    src: TensorSpec,
    states: Sequence[TensorSpec] | None,
    weights: Sequence[TensorSpec],
    kind: str,
    *,
    has_biases: bool = True,
    layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
) -> tuple[TensorSpec, ...]:
    """ops.recurrent of a padded sequence."""
    check_floating(src, *weights, *(states or ()))
    if src.ndim not in (2, 3):
        raise Unclear
    steps, samples, _ = _in_time(src, batch_first)
    directions = 1 + bidirectional
    batch = (samples,) if src.ndim == 3 else ()
    if misfit(src, states, (layers * directions, *batch), weights, kind):
        raise Unclear
    output = row_major((steps, samples, directions * weights[1].shape[1]), src.dtype)
    if src.ndim == 2:
        output = row_major((steps, output.shape[2]), src.dtype)
    elif batch_first:
        (steps, samples, width), (a, b, c) = output.shape, output.strides
        output = TensorSpec((samples, steps, width), src.dtype, (b, a, c))
    widths = state_widths(weights[1].shape, kind)
    return (output, *(row_major((layers * directions, *batch, width), src.dtype) for width in widths))


def _in_time(src: TensorSpec, batch_first: bool) -> tuple[int, int, int]:
    if src.ndim == 2:
        return src.shape[0], 1, src.shape[1]
    first, second, width = src.shape
    return (second, first, width) if batch_first else (first, second, width)


def recurrent_layer(
    src: TensorSpec,
    h: TensorSpec | None,
    c: TensorSpec | None,
    weights: Sequence[TensorSpec],
    kind: str,
    *,
    has_biases: bool = True,
    reverse: bool = False,
    with_cell: bool = False,
) -> TensorSpec:
    """ops.recurrent_layer."""
    check_floating(src, *weights)
    steps, samples, _ = src.shape
    hidden, width = weights[1].shape[0] // GATES[kind], weights[1].shape[1]
    if with_cell:
        return row_major((state_offset(steps * samples * width) + samples * hidden,), src.dtype)
    return row_major((steps, samples, width), src.dtype)


def recurrent_cell(
    src: TensorSpec, states: Sequence[TensorSpec] | None, weights: Sequence[TensorSpec], kind: str, **_: Any
) -> Any:
    """ops.recurrent_cell."""
    check_floating(src, *weights, *(states or ()))
    if misfit(src, states, src.shape[:-1], weights, kind):
        raise Unclear
    state = row_major((*src.shape[:-1], weights[1].shape[1]), src.dtype)
    return (state,) * (1 + (kind == "lstm"))


def holding(weight: TensorSpec) -> TensorSpec:
    """ops.holding."""
    check_floating(weight)
    return row_major((weight.shape[0], weight.shape[1] + 1), weight.dtype)


def selective_scan(
    delta: TensorSpec,
    a: TensorSpec,
    drive: TensorSpec,
    b: TensorSpec,
    c: TensorSpec,
    state: TensorSpec | None,
    *,
    with_state: bool = False,
) -> TensorSpec:
    """ops.selective_scan."""
    read, last = selective_scan_and_state(delta, a, drive, b, c, state)
    return row_major((state_offset(read.numel) + last.numel,), read.dtype) if with_state else read


def selective_scan_and_state(
    delta: TensorSpec, a: TensorSpec, drive: TensorSpec, b: TensorSpec, c: TensorSpec, state: TensorSpec | None
) -> tuple[TensorSpec, TensorSpec]:
    """ops.selective_scan_and_state."""
    others = [a, drive, b, c, *([] if state is None else [state])]
    check_floating(delta, *others)
    if delta.ndim != 3 or a.ndim != 2 or any(spec.dtype != delta.dtype for spec in others):
        raise Unclear
    (samples, width, steps), numbers = delta.shape, a.shape[1]
    rows, state_shape = (samples, steps, numbers), (samples, width, numbers)
    if (a.shape[0], drive.shape, b.shape, c.shape) != (width, delta.shape, rows, rows) or not steps:
        raise Unclear
    if state is not None and state.shape != state_shape:
        raise Unclear
    return row_major(delta.shape, delta.dtype), row_major(state_shape, delta.dtype)
