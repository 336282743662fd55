"""One recurrent layer on one sample as products of one row, a step each: they read weights faster than its primitive.

    gates of the inputs of all steps by one product, then for each step
    LSTM  gates = 2 ** [0 0 0 1] * c ** [0 1 0 0] * (sigmoid(gates of the input + W h) - [0 0 0 1/2])   [i, f * c, o, g]
          c = i * g + f * c;  h = tanh(c) * o
    GRU   [r, u] = sigmoid(gates of the input + W h);  h = (tanh(r * (W' h + b) + gate of the input) - h) * u + h
    RNN   h = tanh(gate of the input + W h)

Each line is one primitive with post-ops: three of an LSTM, two of a GRU. A tangent is a sigmoid of the double: rows of
the new cell state's weights are doubled. u is 1 less PyTorch's update gate: rows of its weights are negated. The
factors of an LSTM's gates lie in one row of which a quarter is the cell state. On one sample a layer is bound by
reading its weights in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fx_passes.candidates.candidates import (
    Argument,
    Candidate,
    LoopTemplate,
    Operand,
    PackedWeights,
    PrimitiveTemplate,
    Result,
    Template,
    Temporary,
    Weights,
    primitive_template,
)
from fx_passes.candidates.layouts import Layout, row_major
from fx_passes.lower.primitives import first_optimized, optimized_implementations
from fx_passes.lower.recurrent.arguments import LayerArguments, copied
from fx_passes.lower.recurrent.loops import looped
from fx_passes.ops.recurrent import state_offset
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import (
    ARG_BIAS,
    ARG_DST,
    ARG_SRC,
    ARG_SRC_1,
    ARG_WEIGHTS,
    PostOps,
    arg_post_op,
)
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc
from zendnn_cffi.runtime.loop_call import Part

# Of recurrent weights. Smaller ones lie in second-level caches, and the calls of a step take longer than reading them.
_LEAST_BYTES = {"lstm": 3 << 19, "gru": 3 << 19, "rnn_tanh": 1 << 20, "rnn_relu": 1 << 20}
_FLOAT_BYTES = 4
_PRODUCTS: tuple[Callable[..., Any], ...] = (descriptors.matmul, descriptors.inner_product)

# PyTorch's gates in our order, and what their rows are multiplied by
_GATES = {
    "lstm": ((0, 1.0), (1, 1.0), (3, 1.0), (2, 2.0)),
    "gru": ((0, 1.0), (1, -1.0), (2, 1.0)),
    "rnn_tanh": ((0, 1.0),),
    "rnn_relu": ((0, 1.0),),
}
_INPUT_GATES, _GATE_ROW, _FACTORS = range(3)  # temporaries


class _Seen(NamedTuple):
    """One argument of a step's primitive, as it lies in the first step: what, how much further on in the next one."""

    argument: Argument
    advance_bytes: int = 0
    is_state: bool = False  # the hidden state: of the first step an argument of its own, of others a part of the result


def by_steps(layer: LayerArguments, srcs: tuple[Layout, ...], dst: Layout) -> list[Candidate]:
    """A candidate for each kind of product; none for several samples, other dtypes, projections, small weights."""
    matrix = layer.weights[1]
    if layer.samples > 1 or {layer.dtype, layer.result} != {torch.float32} or layer.is_projected or layer.steps < 2:
        return []
    if (
        len(layer.states) not in (0, 1 + (layer.kind == "lstm"))
        or matrix.numel() * _FLOAT_BYTES < _LEAST_BYTES[layer.kind]
    ):
        return []
    found = []
    for describe in _PRODUCTS:
        steps = _Steps(layer, describe)
        calls = steps.calls()
        if calls is not None:
            found.append(Candidate(f"steps {steps.implementation}", srcs, dst, calls))
    return found


class _Steps:
    def __init__(self, layer: LayerArguments, describe: Callable[..., Any]) -> None:
        self._layer, self._describe = layer, describe
        self._hidden, self._width = layer.hidden, layer.gates * layer.hidden
        self.implementation = ""

    def calls(self) -> tuple[Template, ...] | None:
        """All that computes the layer; None where a primitive has no optimized implementation."""
        layer = self._layer
        inputs = self._gates_of_inputs()
        steps = {"lstm": self._lstm, "gru": self._gru}.get(layer.kind, self._rnn)()
        if inputs is None or any(pd is None for pd, _ in steps):
            return None
        found = [(pd, args) for pd, args in steps if pd is not None]
        self.implementation = found[0][0].implementation
        first = [primitive_template(pd, self._of_first(args), "rnn", self._flops(pd)) for pd, args in found]
        return (inputs, *self._before(), *first, self._loop(found), *self._after())

    # Places. In the direction of time a step lies behind the one before it, in reverse before it.

    @property
    def _first(self) -> int:
        return self._layer.steps - 1 if self._layer.reverse else 0

    def _of_inputs(self, first_gate: int, gates: int) -> _Seen:
        """Gates of a step's input."""
        desc, row_bytes = self._row(gates), self._width * _FLOAT_BYTES
        offset = self._first * row_bytes + first_gate * self._hidden * _FLOAT_BYTES
        return _Seen(Temporary(_INPUT_GATES, desc, offset), self._onwards(row_bytes))

    def _written(self) -> _Seen:
        """The hidden state after a step: a row of the result."""
        row_bytes = self._hidden * _FLOAT_BYTES
        return _Seen(Result(self._row(1), self._first * row_bytes), self._onwards(row_bytes))

    def _state(self) -> _Seen:
        """The hidden state before a step."""
        return _Seen(self._written().argument, self._written().advance_bytes, is_state=True)

    def _onwards(self, size_bytes: int) -> int:
        return -size_bytes if self._layer.reverse else size_bytes

    def _row(self, gates: int) -> MemoryDesc:
        return row_major((1, gates * self._hidden), torch.float32)

    def _gate(self, number: int, gates: int = 1) -> _Seen:
        return _Seen(Temporary(_GATE_ROW, self._row(gates), number * self._hidden * _FLOAT_BYTES))

    def _cell(self) -> Temporary:
        return Temporary(_FACTORS, self._row(1), self._hidden * _FLOAT_BYTES)

    # Calls.

    def _gates_of_inputs(self) -> PrimitiveTemplate | None:
        layer = self._layer
        src = row_major((layer.steps, layer.inputs), torch.float32)
        dst = row_major((layer.steps, self._width), torch.float32)
        names = " + ".join(layer.names[2:4]) if layer.has_biases else "no bias"
        bias = Weights(f"{names} by steps", self._bias(), self._row(layer.gates))
        packed = self._packed(0, range(layer.gates), transposed=True)
        args: dict[int, Argument | PackedWeights] = {ARG_SRC: Operand(0, src), ARG_BIAS: bias, ARG_WEIGHTS: packed}
        weights = MemoryDesc((layer.inputs, self._width), torch.float32, "any")
        args[ARG_DST] = Temporary(_INPUT_GATES, dst)
        flops = 2 * layer.steps * layer.inputs * self._width
        return first_optimized(args, "matmul", descriptors.matmul, src, weights, bias.desc, dst, flops=flops)

    def _lstm(self) -> list[tuple[PrimitiveDesc | None, dict[int, _Seen]]]:
        row, part = self._row(4), self._row(1)
        half = torch.zeros(4, self._hidden, dtype=torch.float32, device="cpu")
        half[3] = -0.5
        post_ops = PostOps().binary("add", row).eltwise("logistic").binary("add", row).binary("mul", row)
        gates = {
            ARG_DST: self._gate(0, 4),
            arg_post_op(0): self._of_inputs(0, 4),
            arg_post_op(2): _Seen(Weights(f"zeros and halves of {self._hidden}", half.view(1, -1), row)),
            arg_post_op(3): _Seen(Temporary(_FACTORS, row)),
        }
        cell = _Seen(self._cell())
        kept = PostOps().binary("add", part)
        through = PostOps().eltwise("tanh").binary("mul", part)
        return [
            self._product(range(4), post_ops, gates),
            (
                self._binary("mul", kept),
                {ARG_SRC: self._gate(0), ARG_SRC_1: self._gate(3), arg_post_op(0): self._gate(1), ARG_DST: cell},
            ),
            (  # the maximum of a value and itself: an implementation for element-wise operations takes no post-op
                self._binary("max", through),
                {ARG_SRC: cell, ARG_SRC_1: cell, arg_post_op(1): self._gate(2), ARG_DST: self._written()},
            ),
        ]

    def _gru(self) -> list[tuple[PrimitiveDesc | None, dict[int, _Seen]]]:
        row, part, state = self._row(2), self._row(1), self._state()
        gates = {ARG_DST: self._gate(0, 2), arg_post_op(0): self._of_inputs(0, 2)}
        new = PostOps().binary("mul", part).binary("add", part).eltwise("tanh")
        new = new.binary("sub", part).binary("mul", part).binary("add", part)
        args = {
            ARG_DST: self._written(),
            arg_post_op(0): self._gate(0),
            arg_post_op(1): self._of_inputs(2, 1),
            arg_post_op(3): state,
            arg_post_op(4): self._gate(1),
            arg_post_op(5): state,
        }
        if self._layer.has_biases:
            own = Weights(
                f"{self._layer.names[3]} by steps", self._layer.weights[3].unflatten(0, (3, -1))[2][None], part
            )
            args[ARG_BIAS] = _Seen(own)
        return [
            self._product(range(2), PostOps().binary("add", row).eltwise("logistic"), gates),
            self._product((2,), new, args),
        ]

    def _rnn(self) -> list[tuple[PrimitiveDesc | None, dict[int, _Seen]]]:
        post_ops = PostOps().binary("add", self._row(1)).eltwise(self._layer.kind.removeprefix("rnn_"))
        return [self._product((0,), post_ops, {ARG_DST: self._written(), arg_post_op(0): self._of_inputs(0, 1)})]

    def _product(
        self, gates: Sequence[int], post_ops: PostOps, args: dict[int, _Seen]
    ) -> tuple[PrimitiveDesc | None, dict[int, _Seen]]:
        """The recurrent product of some gates."""
        count, hidden = len(gates), self._hidden
        by_columns = self._describe is descriptors.matmul
        dims = (hidden, count * hidden) if by_columns else (count * hidden, hidden)
        bias = args[ARG_BIAS].argument.desc if ARG_BIAS in args else None
        if bias is not None and not by_columns:
            bias = row_major((count * hidden,), torch.float32)
            args = {**args, ARG_BIAS: _Seen(replace(args[ARG_BIAS].argument, desc=bias))}
        weights = MemoryDesc(dims, torch.float32, "any")
        found = optimized_implementations(
            self._describe, self._row(1), weights, bias, self._row(count), post_ops=post_ops
        )
        for pd in found:
            packed = self._packed(1, gates, by_columns).wanted_by(pd)
            return pd, {**args, ARG_SRC: self._state(), ARG_WEIGHTS: _Seen(packed)}
        return None, args

    def _binary(self, kind: str, post_ops: PostOps) -> PrimitiveDesc | None:
        part = self._row(1)
        return next(
            iter(optimized_implementations(descriptors.binary, kind, part, part, part, post_ops=post_ops)), None
        )

    def _before(self) -> Iterator[Template]:
        """What lies in temporaries and is not written by steps: an LSTM's factors, the cell state among them."""
        if self._layer.kind != "lstm":
            return
        row = self._row(4)
        factors = torch.zeros(4, self._hidden, dtype=torch.float32, device="cpu")
        factors[0], factors[2], factors[3] = 1.0, 1.0, 2.0
        constant = Weights(f"factors of {self._hidden}", factors.view(1, -1), row)
        yield copied(constant, Temporary(_FACTORS, row))
        if self._layer.states:
            yield copied(Operand(self._layer.states[1], self._row(1)), self._cell())

    def _after(self) -> Iterator[Template]:
        if self._layer.with_cell:
            offset = state_offset(self._layer.output_numbers) * _FLOAT_BYTES
            yield copied(self._cell(), Result(self._row(1), offset))

    def _of_first(self, args: dict[int, _Seen]) -> dict[int, Argument | PackedWeights]:
        """Arguments of a primitive in the first step."""
        row = self._row(1)
        if self._layer.states:
            state: Argument = Operand(self._layer.states[0], row)
        else:
            state = Weights(
                f"zeros of {self._hidden}", torch.zeros(1, self._hidden, dtype=torch.float32, device="cpu"), row
            )
        return {arg: state if seen.is_state else seen.argument for arg, seen in args.items()}

    def _loop(self, steps: list[tuple[PrimitiveDesc, dict[int, _Seen]]]) -> LoopTemplate:
        """All steps but the first one."""
        arguments: list[Argument] = []
        numbers: dict[object, int] = {}

        def part(desc: MemoryDesc, seen: _Seen) -> Part:
            whole, offset_bytes = self._whole(seen.argument)
            key = id(whole) if isinstance(whole, Weights) else whole
            if key not in numbers:
                numbers[key] = len(arguments)
                arguments.append(whole)
            if not seen.is_state:  # a state is what the step before wrote
                offset_bytes += seen.advance_bytes
            return Part(numbers[key], desc, offset_bytes, seen.advance_bytes)

        made = []
        for pd, args in steps:
            made.append((pd, {arg: part(self._desc(seen.argument), seen) for arg, seen in args.items()}))
        rounds = self._layer.steps - 1
        return looped(made, arguments, rounds, "rnn", rounds * sum(self._flops(pd) for pd, _ in steps))

    def _whole(self, argument: Argument) -> tuple[Argument, int]:
        """All of what a step sees a part of, and where the part of the first step begins."""
        rows = self._layer.steps
        match argument:
            case Result(offset_bytes=offset_bytes):
                return Result(row_major((rows, self._hidden), torch.float32)), offset_bytes
            case Temporary(index, _, offset_bytes):
                rows = rows if index == _INPUT_GATES else 1
                return Temporary(index, row_major((rows, self._width), torch.float32)), offset_bytes
        return argument, 0

    @staticmethod
    def _desc(argument: Argument) -> MemoryDesc:
        assert argument.desc is not None
        return argument.desc

    # Constants.

    def _flops(self, pd: PrimitiveDesc) -> int:
        desc = pd.weights_desc
        return 0 if desc is None else 2 * desc.dims[0] * desc.dims[1]

    def _packed(self, index: int, gates: Sequence[int], transposed: bool) -> PackedWeights:
        layer, chosen = self._layer, [_GATES[self._layer.kind][gate] for gate in gates]
        weight = layer.weights[index]

        def late() -> Tensor:
            each = layer.by_gate(weight)
            return torch.cat([each[gate] * factor for gate, factor in chosen])

        plain = torch.empty(len(chosen) * self._hidden, weight.shape[1], dtype=torch.float32, device="meta")
        return PackedWeights(f"{layer.names[index]} by steps {[*gates]}", plain, transposed, late)

    def _bias(self) -> Tensor:
        """Both biases, but of a GRU's new state, whose recurrent bias the reset gate multiplies."""
        layer = self._layer
        if not layer.has_biases:
            return torch.zeros(1, self._width, dtype=torch.float32, device="cpu")
        first, second = map(layer.by_gate, layer.weights[2:4])
        both = [
            a if layer.kind == "gru" and gate == 2 else a + b
            for gate, (a, b) in enumerate(zip(first, second, strict=True))
        ]
        return torch.cat([both[gate] * factor for gate, factor in _GATES[layer.kind]])[None]
