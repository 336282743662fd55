"""Mamba's selective scan by primitives, three a step: its states never leave the caches.

    decayed = exp(a * delta[t]) * state         an element-wise product with two post-ops
    state   = b[t] x drive[t] + decayed         a product of a column and a row, and a sum
    read[t] = c[t] @ state                      a product of one row

Written out, PyTorch makes tensors [B, D, T, N] of all decays and drives first, sixteen times as large as the input.
States lie as [N, D] here, so that delta and drive are rows, which lie one behind the other as steps follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fx_passes import ops
from fx_passes.candidates.candidates import (
    Argument,
    Candidate,
    LoopTemplate,
    Operand,
    Operation,
    Result,
    Template,
    Temporary,
    TorchTemplate,
    Weights,
)
from fx_passes.candidates.layouts import Layout, row_major, strided
from fx_passes.lower.context import LoweringContext, NotLowered, constant_name
from fx_passes.lower.primitives import optimized_implementations
from fx_passes.lower.recurrent.arguments import copied
from fx_passes.lower.recurrent.loops import looped
from fx_passes.ops.recurrent import state_offset
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import (
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

_RUN_TIME = ("delta", "drive", "b", "c", "state")
_ROWS = ("b", "c")  # of these a step's numbers lie side by side as they are
_STILL = ("a", "decayed", "state")  # what all steps see where it is
_DECAYED, _STATE = range(2)  # temporaries
_FLOAT_BYTES = 4


def lower_selective_scan(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.selective_scan with constant rates; it computes in float32, whatever the region's dtype is."""
    arguments, spec = context.values.arguments(node), context.values.specs[node]
    rates = context.constant(arguments["a"], "a", (torch.float32,))
    given = {name: arguments[name] for name in _RUN_TIME if arguments[name] is not None}
    if any(context.tensor(operand, name).dtype != torch.float32 for name, operand in given.items()):
        raise NotLowered("a selective scan of another dtype than float32")
    operands = tuple(dict.fromkeys(given.values()))
    places = {name: operands.index(operand) for name, operand in given.items()}
    shape, with_state = context.tensor(arguments["delta"], "delta").shape, arguments["with_state"]
    scan = _Scan(rates, constant_name(node, "a"), shape, places, with_state)
    operation = Operation(node, node.name, "selective_scan", operands, spec)
    rows = {given[name] for name in _ROWS}
    if rows & {operand for name, operand in given.items() if name not in _ROWS}:
        raise NotLowered("one tensor is wanted in two layouts")
    shapes = [context.values.specs[operand].shape for operand in operands]
    steps = tuple(
        row_major(shape, torch.float32) if operand in rows else _swapped(shape)
        for operand, shape in zip(operands, shapes, strict=True)
    )
    calls = scan.calls()
    if calls is not None:
        dst = row_major(spec.shape, torch.float32) if with_state else _swapped(shape)
        operation.candidates.append(Candidate(scan.implementation, steps, dst, calls))
    eager = tuple(row_major(shape, torch.float32) for shape in shapes)
    operation.candidates.append(Candidate("torch", eager, row_major(spec.shape, torch.float32), (scan.by_torch(),)))
    return operation


def _swapped(shape: tuple[int, ...]) -> Layout:
    """[B, D, T] as [B, T, D] lies: a step's numbers side by side."""
    samples, rows, columns = shape
    return strided(shape, torch.float32, (rows * columns, 1, rows))


class _Scan:
    """Sizes, and where the operands are."""

    def __init__(
        self, rates: Tensor, name: str, shape: tuple[int, ...], places: dict[str, int], with_state: bool
    ) -> None:
        self.rates, self.name, self._places, self._with_state = rates, name, places, with_state
        self.samples, self.width, self.steps = shape
        self.numbers = rates.shape[1]
        self.implementation = ""
        self._states = row_major((self.numbers, self.width), torch.float32)
        self._row = row_major((1, self.width), torch.float32)
        self._column = row_major((self.numbers, 1), torch.float32)
        self._across = row_major((1, self.numbers), torch.float32)

    def calls(self) -> tuple[Template, ...] | None:
        """All that computes it; None where a primitive has no optimized implementation."""
        states, row = self._states, self._row
        decay = PostOps().eltwise("exp").binary("mul", states)
        found = [
            _first(descriptors.binary, "mul", states, row, states, post_ops=decay),
            _first(descriptors.matmul, self._column, row, None, states, post_ops=PostOps().binary("add", states)),
            _first(descriptors.matmul, self._across, states, None, row),
        ]
        steps = [pd for pd in found if pd is not None]
        if len(steps) < len(found):
            return None
        self.implementation = f"steps {steps[1].implementation}"
        calls: list[Template] = []
        for sample in range(self.samples):
            calls += (self._begin(sample), self._loop(steps, sample))
        return tuple(calls)

    def _begin(self, sample: int) -> Template:
        """The state before the first step, which lies as [N, D]."""
        source: Argument
        if "state" in self._places:
            source = Operand(self._places["state"], self._states, sample * self._states.size_bytes)
        else:
            zeros = torch.zeros(self._states.dims, dtype=torch.float32, device="cpu")
            source = Weights(f"zeros of {self._states.dims}", zeros, self._states)
        return copied(source, self._state(sample))

    def _state(self, sample: int) -> Argument:
        """Where the state is, of a sample: behind what is read of it, if it is read at last."""
        if not self._with_state:
            return Temporary(_STATE, self._states)
        behind = state_offset(self.samples * self.steps * self.width) * _FLOAT_BYTES
        return Result(self._states, behind + sample * self._states.size_bytes)

    def _loop(self, steps: list[PrimitiveDesc], sample: int) -> LoopTemplate:
        """All steps of a sample."""
        rows = row_major((self.samples * self.steps, self.width), torch.float32)
        numbers = row_major((self.samples * self.steps, self.numbers), torch.float32)
        key = f"{self.name} of a scan"
        arguments: dict[str, Argument] = {
            "a": Weights(key, self.rates, self._states, transposed=True),
            "decayed": Temporary(_DECAYED, self._states),
            "state": self._state(sample),
            "delta": Operand(self._places["delta"], rows),
            "drive": Operand(self._places["drive"], rows),
            "b": Operand(self._places["b"], numbers),
            "c": Operand(self._places["c"], numbers),
            "read": Result(rows),
        }
        places = [*arguments]

        def part(name: str, desc: MemoryDesc) -> Part:
            if name in _STILL:
                return Part(places.index(name), desc)
            return Part(places.index(name), desc, sample * self.steps * desc.size_bytes, desc.size_bytes)

        decay, drive, read = steps
        made: list[tuple[PrimitiveDesc, dict[int, Part]]] = [
            (
                decay,
                {
                    ARG_SRC: part("a", self._states),
                    ARG_SRC_1: part("delta", self._row),
                    arg_post_op(1): part("state", self._states),
                    ARG_DST: part("decayed", self._states),
                },
            ),
            (
                drive,
                {
                    ARG_SRC: part("b", self._column),
                    ARG_WEIGHTS: part("drive", self._row),
                    arg_post_op(0): part("decayed", self._states),
                    ARG_DST: part("state", self._states),
                },
            ),
            (
                read,
                {
                    ARG_SRC: part("c", self._across),
                    ARG_WEIGHTS: part("state", self._states),
                    ARG_DST: part("read", self._row),
                },
            ),
        ]
        return looped(made, [*arguments.values()], self.steps, "scan", self.flops // self.samples)

    @property
    def flops(self) -> int:
        """An exponential counts as one."""
        return 7 * self.samples * self.steps * self.width * self.numbers

    def by_torch(self) -> TorchTemplate:
        """The body on operands as eager has them: the rival."""
        names, with_state = [*self._places], self._with_state

        def compute(a: Tensor, *given: Tensor) -> Tensor:
            operands = {"state": None, **dict(zip(names, given, strict=True))}
            return ops.selective_scan(a=a, **operands, with_state=with_state)

        rates = Weights(f"{self.name} of a scan", self.rates, row_major(tuple(self.rates.shape), torch.float32))
        args: tuple[Argument, ...] = (rates, *map(Operand, self._places.values()), Result())
        key = f"{torch.__version__} selective_scan {tuple(self.rates.shape)} {self._places}"
        key += " and state" if with_state else ""
        return TorchTemplate(compute, "", False, key, args, flops=self.flops)


def _first(describe: Callable[..., Any], *args: Any, post_ops: PostOps | None = None) -> PrimitiveDesc | None:
    return next(iter(optimized_implementations(describe, *args, post_ops=post_ops or PostOps())), None)
