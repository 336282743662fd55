"""Take stacks of recurrent layers and cells apart, where shapes are known: one operation per layer and direction.

    y, h, c = recurrent(x, None, weights, "lstm", layers=2, batch_first=True)
    ->  time-major x -> recurrent_layer -> recurrent_layer -> batch-major y, and the last steps are h

The last hidden state is a step of the output. The last cell state of an LSTM, where it is read, follows the output's
numbers in one result, so that each operation has one. So does the last state of a scan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.specs import RegionValues
from fx_passes.graph.graph import is_call
from fx_passes.lower.context import NotLowered
from fx_passes.ops.recurrent import state_offset

_Call = Callable[..., fx.Node]


def expand_recurrent(graph: fx.Graph, values: RegionValues) -> None:
    """Rewrite graph. Raises NotLowered for what has neither two nor three dimensions, or is empty."""
    for node in [n for n in graph.nodes if is_call(n, *_EXPANDED)]:
        count = len(values.numbers[node])
        readers: dict[int, list[fx.Node]] = {}
        for user in node.users:
            readers.setdefault(user.args[1] % count, []).append(user)
        with graph.inserting_before(node):
            call = _caller(graph, node, values)
            results = _EXPANDED[node.target](node, values, call, frozenset(readers))
        for index, users in readers.items():
            for user in users:
                user.replace_all_uses_with(results[index])
                graph.erase_node(user)
        graph.erase_node(node)


def _caller(graph: fx.Graph, node: fx.Node, values: RegionValues) -> _Call:
    """call(operation, *arguments): a node whose shape is known."""

    def call(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.create_node("call_function", operation, args, kwargs, name=f"{node.name}_{operation.__name__}")
        made.meta["source"] = node.meta.get("source", "")
        values.infer(made)
        return made

    return call


def _expand_stack(node: fx.Node, values: RegionValues, call: _Call, read: frozenset[int]) -> dict[int, fx.Node]:
    src, states, weights, kind = node.args
    layers, directions = node.kwargs["layers"], 1 + node.kwargs["bidirectional"]
    batch_first, has_biases = node.kwargs["batch_first"], node.kwargs["has_biases"]
    spec = _operand(src, values)
    x = src
    if spec.ndim == 2:
        x = call(ops.reshape, x, (spec.shape[0], 1, spec.shape[1]))
    elif batch_first:
        x = call(ops.transpose, x, 0, 1)
    samples = 1 if spec.ndim == 2 else spec.shape[0 if batch_first else 1]
    if states is not None:
        states = [_as_rows(state, samples, values, call) for state in states]
    each = len(weights) // (layers * directions)
    hidden: list[fx.Node] = []
    cells: list[fx.Node] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            row = layer * directions + direction
            given = [None if states is None else _row(state, row, values, call) for state in states or ()]
            h, c = (*given, None, None)[:2]
            own = tuple(weights[row * each : (row + 1) * each])
            output, cell = _layer(call, values, x, h, c, own, kind, has_biases, direction == 1, 2 in read)
            outputs.append(output)
            hidden += [_last_step(output, direction == 1, values, call)] if 1 in read else []
            cells += [] if cell is None else [cell]
        x = outputs[0] if directions == 1 else call(ops.concat, tuple(outputs), 2)
    results: dict[int, fx.Node] = {}
    if 0 in read:
        results[0] = _as_given(x, spec.ndim, batch_first, values, call)
    for index, rows in ((1, hidden), (2, cells)):
        if index in read:
            whole = rows[0] if len(rows) == 1 else call(ops.concat, tuple(rows), 0)
            results[index] = _as_given(whole, spec.ndim, False, values, call)
    return results


def _expand_cell(node: fx.Node, values: RegionValues, call: _Call, read: frozenset[int]) -> dict[int, fx.Node]:
    """A sequence of one step."""
    src, states, weights, kind = node.args
    spec = values.known(src)
    if spec.ndim not in (1, 2) or not spec.numel:
        raise NotLowered(f"a cell on {spec}")
    samples, width = 1 if spec.ndim == 1 else spec.shape[0], spec.shape[-1]
    x = call(ops.reshape, src, (1, samples, width))
    given = [call(ops.reshape, state, (1, samples, values.known(state).shape[-1])) for state in states or ()]
    h, c = (*given, None, None)[:2]
    output, cell = _layer(call, values, x, h, c, tuple(weights), kind, node.kwargs["has_biases"], False, 1 in read)
    shape = (*spec.shape[:-1], values.specs[output].shape[-1])
    results = {0: call(ops.reshape, output, shape)} if 0 in read else {}
    if cell is not None:
        results[1] = call(ops.reshape, cell, shape)
    return results


def _layer(
    call: _Call,
    values: RegionValues,
    x: fx.Node,
    h: fx.Node | None,
    c: fx.Node | None,
    weights: tuple[Any, ...],
    kind: str,
    has_biases: bool,
    reverse: bool,
    with_cell: bool,
) -> tuple[fx.Node, fx.Node | None]:
    """The output [T, N, O] of one layer in one direction, and its last cell state [1, N, H] where that is read."""
    with_cell = with_cell and kind == "lstm"
    settings = {"has_biases": has_biases, "reverse": reverse, "with_cell": with_cell}
    result = call(ops.recurrent_layer, x, h, c, weights, kind, **settings)
    if not with_cell:
        return result, None
    (steps, samples, _), matrix = values.known(x).shape, values.known(weights[1]).shape
    hidden, width = matrix[0] // ops.GATES[kind], matrix[1]
    return _output(result, (steps, samples, width), call), _behind(
        result, steps * samples * width, (1, samples, hidden), call
    )


def _output(both: fx.Node, shape: tuple[int, ...], call: _Call) -> fx.Node:
    """The output of a result that has a state behind it."""
    return call(ops.reshape, call(ops.narrow, both, 0, 0, math.prod(shape)), shape)


def _behind(both: fx.Node, numbers: int, shape: tuple[int, ...], call: _Call) -> fx.Node:
    """The state behind so many numbers of an output."""
    return call(ops.reshape, call(ops.narrow, both, 0, state_offset(numbers), None), shape)


def _operand(node: Any, values: RegionValues) -> Any:
    spec = values.known(node)
    if spec.ndim not in (2, 3) or not spec.numel:
        raise NotLowered(f"a recurrent network on {spec}")
    return spec


def _as_rows(state: fx.Node, samples: int, values: RegionValues, call: _Call) -> fx.Node | None:
    """An initial state as [rows, N, width]; None for a constant that is zero throughout."""
    constant = values.constants.get(state)
    if isinstance(constant, torch.Tensor) and not bool(constant.any()):
        return None
    spec = values.known(state)
    return state if spec.ndim == 3 else call(ops.reshape, state, (spec.shape[0], samples, spec.shape[-1]))


def _row(state: fx.Node | None, row: int, values: RegionValues, call: _Call) -> fx.Node | None:
    if state is None or values.known(state).shape[0] == 1:
        return state
    return call(ops.narrow, state, 0, row, row + 1)


def _last_step(output: fx.Node, reverse: bool, values: RegionValues, call: _Call) -> fx.Node:
    steps = values.specs[output].shape[0]
    if steps == 1:
        return output
    return call(ops.narrow, output, 0, 0, 1) if reverse else call(ops.narrow, output, 0, steps - 1, steps)


def _as_given(value: fx.Node, ndim: int, batch_first: bool, values: RegionValues, call: _Call) -> fx.Node:
    """[T, N, O] without its batch, or with the batch first, as the source was."""
    shape: Sequence[int] = values.specs[value].shape
    if ndim == 2:
        return call(ops.reshape, value, (shape[0], shape[2]))
    return call(ops.transpose, value, 0, 1) if batch_first else value


def _expand_scan(node: fx.Node, values: RegionValues, call: _Call, read: frozenset[int]) -> dict[int, fx.Node]:
    """What is read, and the last state, which the caller may keep: as eager has it, not between other numbers."""
    (samples, width, steps), (_, numbers) = (values.known(source).shape for source in node.args[:2])
    if 1 not in read:
        return {0: call(ops.selective_scan, *node.args)}
    both = call(ops.selective_scan, *node.args, with_state=True)
    last = _behind(both, samples * steps * width, (samples, numbers, width), call)
    results = {1: call(ops.contiguous, call(ops.transpose, last, 1, 2))}
    if 0 in read:
        results[0] = call(ops.transpose, _output(both, (samples, steps, width), call), 1, 2)
    return results


_EXPANDED: dict[Callable[..., Any], Callable[..., dict[int, fx.Node]]] = {
    ops.recurrent: _expand_stack,
    ops.recurrent_cell: _expand_cell,
    ops.selective_scan_and_state: _expand_scan,
}
