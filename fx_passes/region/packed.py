"""Packed sequences through recurrent layers: padded for the engine, packed again behind it.

    PackedSequence  ->  [T, N, I]  ->  region: take_rows, recurrent, concat  ->  [T, N, O]  ->  PackedSequence

What follows the end of a text is computed for nothing, and not read. A layer in reverse begins at each text's own end:
its input's steps are taken in reverse order, and its output's again. The last hidden states are rows of the outputs. An
LSTM's cell state is kept beyond the end of a text by an input of its own, which is 1 there (fx_passes.ops.holding).

PyTorch computes packed sequences step by step, without padding. Where tuning is on, both ways are measured, once for
lengths of about one kind.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence

from fx_passes import ops
from fx_passes.graph.graph import is_call
from zendnn_cffi.primitives.checks import check_storage
from zendnn_cffi.runtime.sizes import rounded_up
from zendnn_cffi.runtime.ways import times_ns

PADDED, STEPS = "padded, in the engine", "step by step, in PyTorch"
_times_ns = functools.partial(times_ns, rounds=3)
# Without measuring: of what is padded, so much must be text. Zen 4, two threads, float32, LSTM, GRU and RNN in three
# shapes each, PyTorch's time / ours: 0.97 (0.85 to 1.37) where 0.4 are text, 1.12 (0.97 to 1.52) where 0.5 are.
_LEAST_FILLED = 0.5
_TENSORS = (Tensor, nn.Parameter)


def stack_of(graph: fx.Graph) -> fx.Node | None:
    """The one stack of recurrent layers that graph computes, of an input with constant weights; else None."""
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    stacks = [node for node in calls if is_call(node, ops.recurrent)]
    if len(stacks) != 1 or any(node is not stacks[0] and stacks[0] not in node.all_input_nodes for node in calls):
        return None
    src, states, weights, _ = stacks[0].args
    inputs = [src, *(states or ())]
    if any(node.op != "placeholder" for node in inputs) or any(weight.op != "get_attr" for weight in weights):
        return None
    return None if len(set(inputs)) < len(inputs) else stacks[0]


def place_of_sequence(stack: fx.Node) -> int:
    """Which input the sequence is."""
    return list(stack.graph.find_nodes(op="placeholder")).index(stack.args[0])


class PackedSequences:
    """Computes a region's stack of packed sequences.

    stack        what stack_of found in the region's graph
    make_region  of a graph over the same constants
    by_steps     computes the region's graph by PyTorch
    tune         as optimize() has it
    """

    def __init__(
        self, stack: fx.Node, make_region: Callable[[fx.Graph], Any], by_steps: Callable[..., Any], tune: str
    ) -> None:
        self.kind: str = stack.args[3]
        places = list(stack.graph.find_nodes(op="placeholder"))
        self._src, self._states = place_of_sequence(stack), [places.index(state) for state in stack.args[1] or ()]
        [output] = stack.graph.find_nodes(op="output")
        results = output.args[0]
        self._single = not isinstance(results, tuple | list)
        self._results = [node.args[1] for node in ([results] if self._single else results)]
        self.region = make_region(padded_graph(stack))
        self._by_steps = by_steps
        self._tune = tune
        # Steps as padded, samples and eighths that are text -> why PyTorch computes such; "" where the engine does.
        self.left: dict[tuple[int, ...], str] = {}

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """The region's outputs of inputs among which the sequence is a PackedSequence."""
        packed = inputs[self._src]
        if not _is_plain(packed) or not all(map(_is_plain_tensor, map(inputs.__getitem__, self._states))):
            self.left[()] = "not an ordinary tensor on the CPU, or not in the order that packing leaves"
            return self._by_steps(inputs)
        for value in (packed.data, *map(inputs.__getitem__, self._states)):
            check_storage(value, f"an input of {self.region.name}")
        steps, samples = packed.batch_sizes.numel(), int(packed.batch_sizes[0])
        padded_to = rounded_up(steps)  # at most an eighth more: not each length is lowered for itself
        filled = packed.data.shape[0] / (padded_to * samples)
        key = padded_to, samples, int(8 * filled)
        if self._tune == "off":
            self.left[key] = "" if filled >= _LEAST_FILLED else f"padded, {1 - filled:.0%} would be padding"
        if self.left.get(key):
            return self._by_steps(inputs)
        result = self._by_padding(inputs, padded_to)
        if key not in self.left:
            ways = {PADDED: lambda: self._by_padding(inputs, padded_to), STEPS: lambda: self._by_steps(inputs)}
            self.left[key] = _why_left(_times_ns(ways))
        return result

    def _by_padding(self, inputs: Sequence[Any], padded_to: int) -> Any:
        data, batch_sizes, order, back = inputs[self._src]
        x, lengths = torch._VF._pad_packed_sequence(data, batch_sizes, False, 0.0, padded_to)
        samples = lengths.numel()
        step = torch.arange(padded_to, device="cpu")[:, None]
        is_over = step >= lengths
        if self.kind == "lstm":
            x = torch.cat([x, is_over[..., None].to(x.dtype)], 2)
        number = torch.arange(samples, device="cpu")
        reverse = torch.where(is_over, step, lengths - 1 - step) * samples + number
        states = [inputs[place] for place in self._states]
        if order is not None:
            states = [state.index_select(1, order) for state in states]
        found = self.region(x, reverse, (lengths - 1) * samples + number, *states)
        output = PackedSequence(torch._VF._pack_padded_sequence(found[0], lengths, False)[0], batch_sizes, order, back)
        last = found[1:] if back is None else [state.index_select(1, back) for state in found[1:]]
        results = (output, *last)
        return results[self._results[0]] if self._single else tuple(results[index] for index in self._results)


def _why_left(times_ns: dict[str, float]) -> str:
    """Why PyTorch computes sequences whose times by both ways these are; "" where the engine does."""
    steps, padded = times_ns[STEPS], times_ns[PADDED]
    if padded <= steps:
        return ""
    return f"measured: {STEPS} {steps / 1e6:.2f} ms, {PADDED} {padded / 1e6:.2f} ms"


def padded_graph(stack: fx.Node) -> fx.Graph:
    """The graph that computes a stack of padded sequences.

    Inputs   the sequence [T, N, I], of an LSTM [T, N, I + 1], where the last says what is over; numbers of rows: those
             of the reverse order [T, N], and of the last steps [N]; the states
    Outputs  the output [T, N, O], the last hidden states, of an LSTM also the last cell states
    """
    _, states, weights, kind = stack.args
    settings = {"has_biases": stack.kwargs["has_biases"], "layers": 1, "bidirectional": False, "batch_first": False}
    layers, directions = stack.kwargs["layers"], 1 + stack.kwargs["bidirectional"]
    graph = fx.Graph()
    x, reverse, last = map(graph.placeholder, ("sequence", "reverse_order", "last_steps"))
    given = [graph.placeholder(f"state_{number}") for number in range(len(states or ()))]
    own: dict[fx.Node, fx.Node] = {weight: graph.node_copy(weight) for weight in dict.fromkeys(weights)}
    is_lstm = kind == "lstm"
    is_over = graph.call_function(ops.narrow, (x, 2, -1, None)) if is_lstm else None
    each = len(weights) // (layers * directions)
    hidden, cells = [], []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            row = layer * directions + direction
            own_weights = [own[weight] for weight in weights[row * each : (row + 1) * each]]
            if is_lstm:
                own_weights[0] = graph.call_function(ops.holding, (own_weights[0],))
            begin = tuple(graph.call_function(ops.narrow, (state, 0, row, row + 1)) for state in given) or None
            source = graph.call_function(ops.take_rows, (x, reverse)) if direction else x
            found = graph.call_function(ops.recurrent, (source, begin, tuple(own_weights), kind), dict(settings))
            y, *cell = (graph.call_function(operator.getitem, (found, i)) for i in ((0, 2) if is_lstm else (0,)))
            state = graph.call_function(ops.take_rows, (y, last))
            hidden.append(graph.call_function(ops.unsqueeze, (state, 0)))
            cells += cell
            outputs.append(graph.call_function(ops.take_rows, (y, reverse)) if direction else y)
        is_last = layer == layers - 1
        pieces = tuple(outputs) if is_last or is_over is None else (*outputs, is_over)
        x = pieces[0] if len(pieces) == 1 else graph.call_function(ops.concat, (pieces, 2))
    states_after = [graph.call_function(ops.concat, (tuple(rows), 0)) if len(rows) > 1 else rows[0]
                    for rows in (hidden, cells) if rows]  # fmt: skip
    graph.output((x, *states_after))
    return graph


def _is_plain(packed: Any) -> bool:
    """Whether this is a PackedSequence of an ordinary tensor, in the order that packing leaves."""
    if type(packed) is not PackedSequence or not _is_plain_tensor(packed.data) or packed.data.ndim != 2:
        return False
    sizes = packed.batch_sizes
    if type(sizes) is not Tensor or sizes.dtype != torch.int64 or sizes.ndim != 1 or not sizes.numel():
        return False
    falls = sizes.numel() == 1 or bool((sizes[1:] <= sizes[:-1]).all())
    return falls and int(sizes[-1]) > 0 and int(sizes.sum()) == packed.data.shape[0]


def _is_plain_tensor(value: Any) -> bool:
    return (
        type(value) in _TENSORS
        and value.is_cpu
        and value.layout is torch.strided
        and not (value.is_neg() or value.is_nested or value.is_quantized or value._is_zerotensor())
        and not (value.requires_grad and torch.is_grad_enabled())
    )
