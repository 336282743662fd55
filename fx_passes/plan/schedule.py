"""Turn chosen candidates into steps over buffers, give the buffers memory, and build the program.

    candidate per operation -> steps (reorders inserted, shared by readers) -> lifetimes -> arena offsets -> Program

Views, sums into a residual, element-wise steps in place and pieces of concatenations make values share a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

import torch
from torch import fx

from fx_passes.candidates.candidates import (
    Argument,
    Candidate,
    Operand,
    Operation,
    Result,
    Scratchpad,
    Template,
    Temporary,
    TorchTemplate,
    Weights,
    arguments_of,
    temporaries_bytes,
)
from fx_passes.candidates.conversions import fastest_conversion, in_steps
from fx_passes.candidates.layouts import Layout, in_memory, row_major, same_bytes
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.context import eager_layout
from fx_passes.plan.buffers import END, Buffer, assign_slots, nest_pieces
from fx_passes.plan.materialise import materialise
from fx_passes.plan.prepack import Prepacked, WeightStore
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.runtime.calls import Call
from zendnn_cffi.runtime.courtesy import give_way
from zendnn_cffi.runtime.places import Slot
from zendnn_cffi.runtime.program import OutputSpec, Program
from zendnn_cffi.values import dataclass

Holds = Callable[[torch.Tensor], bool]


@dataclass
class Step:
    """One call to be: its template, and a buffer for each argument that is not a weight."""

    name: str
    operation: Operation | None
    template: Template
    srcs: list[tuple[Buffer, Layout]]
    dst: tuple[Buffer, Layout]
    scratchpad: Buffer | None = None
    temporaries: Mapping[int, Buffer] = field(default_factory=dict)


class Takeover(NamedTuple):
    """A result that may lie where an operand of the same step lies.

    beside  what else the step reads, in other places or other layouts: it must not lie there as well
    """

    step: int
    source: Buffer
    result: Buffer
    beside: list[Buffer]


@dataclass
class Schedule:
    """The state of scheduling: steps so far, and where each value lies in which layouts."""

    weights: WeightStore
    steps: list[Step] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    places: dict[fx.Node, list[tuple[Layout, Buffer]]] = field(default_factory=dict)
    takeovers: list[Takeover] = field(default_factory=list)
    guarded: dict[tuple[str, Holds], list[Buffer]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def new_buffer(self, desc: Layout) -> Buffer:
        return self._new_memory(desc.size_bytes)

    def _new_memory(self, size_bytes: int) -> Buffer:
        buffer = Buffer(size_bytes, len(self.steps), len(self.steps))
        self.buffers.append(buffer)
        return buffer

    def fetch(self, node: fx.Node, want: Layout, reader: str) -> Buffer:
        """Where node's value lies in the layout `want`, after a reorder if it lies in no such layout yet."""
        for have, buffer in self.places[node]:
            if same_bytes(have, want):
                buffer.touch(len(self.steps))
                return buffer
        have, source = self.places[node][0]
        source.touch(len(self.steps))
        buffer = self.new_buffer(want)
        self._reorder(f"{node.name} for {reader}", have, source, want, buffer)
        self.places[node].append((want, buffer))
        buffer.touch(len(self.steps))
        return buffer

    def _reorder(self, name: str, have: Layout, source: Buffer, want: Layout, buffer: Buffer) -> None:
        *first, (have, want) = in_steps(have, want)
        for before, between in first:
            middle = self.new_buffer(between)
            self._convert(name, before, source, between, middle)
            source = middle
        self._convert(name, have, source, want, buffer)

    def _convert(self, name: str, have: Layout, source: Buffer, want: Layout, buffer: Buffer) -> None:
        template = fastest_conversion(have, want)
        source.touch(len(self.steps))
        buffer.touch(len(self.steps))
        self.steps.append(Step(name, None, template, [(source, have)], (buffer, want), self._scratchpad(template)))

    def _scratchpad(self, template: Template) -> Buffer | None:
        """Memory for the step to be, where its primitive asks for some."""
        pads = [argument for argument in arguments_of(template) if isinstance(argument, Scratchpad)]
        return self.new_buffer(pads[0].desc) if pads else None

    def compute(self, operation: Operation, candidate: Candidate) -> None:
        """Append the candidate's calls; afterwards the operation's value lies in candidate.dst."""
        wanted = zip(operation.operands, candidate.srcs, strict=True)
        sources = [(self.fetch(node, desc, operation.name), desc) for node, desc in wanted]
        if candidate.is_view:
            buffer = sources[0][0]
            if candidate.offset_bytes:
                inside = Buffer(candidate.dst.size_bytes, len(self.steps), len(self.steps))
                inside.home = buffer, candidate.offset_bytes
                self.buffers.append(inside)
                buffer = inside
            self.places[operation.node] = [(candidate.dst, buffer)]
            return
        if candidate.overwrites is not None:
            result = sources[candidate.overwrites][0]
        else:
            result = self.new_buffer(candidate.dst)
            if candidate.may_overwrite is not None:
                source, layout = sources[candidate.may_overwrite]
                beside = [b for b, other in sources if b is not source or not same_bytes(other, layout)]
                self.takeovers.append(Takeover(len(self.steps), source, result, beside))
        sizes = temporaries_bytes(candidate)
        temporaries: dict[int, Buffer] = {}
        for template in self._needed(candidate, [buffer for buffer, _ in sources], result):
            for argument in arguments_of(template):
                if isinstance(argument, Temporary) and argument.index not in temporaries:
                    temporaries[argument.index] = self._new_memory(sizes[argument.index])
            for buffer in [*(buffer for buffer, _ in sources), result, *temporaries.values()]:
                buffer.touch(len(self.steps))
            scratchpad, place = self._scratchpad(template), (result, candidate.dst)
            self.steps.append(Step(operation.name, operation, template, sources, place, scratchpad, temporaries))
        if (guard := candidate.guard) is not None:
            self.guarded.setdefault((guard.kind, guard.holds), []).append(temporaries[guard.index])
        self.places[operation.node] = [(candidate.dst, result)]

    def _needed(self, candidate: Candidate, sources: Sequence[Buffer], result: Buffer) -> Sequence[Template]:
        """The candidate's calls, without the copies of pieces that are written straight into their slice."""
        if not candidate.slices_bytes:
            return candidate.calls
        sizes = [desc.size_bytes for desc in candidate.srcs]
        nested = nest_pieces(list(zip(sources, sizes, candidate.slices_bytes, strict=True)), result)
        result.touch(len(self.steps))
        return [call for call, inside in zip(candidate.calls, nested, strict=True) if not inside]

    def leave(self, number: int, node: fx.Node, want: Layout) -> None:
        """Make node's value output `number`, in the layout `want`: in place where its buffer is free to be one."""
        have, buffer = self.places[node][0]
        root = buffer.root
        if not (same_bytes(have, want) and root.space == "arena" and root.size_bytes == want.size_bytes):
            buffer.touch(len(self.steps))
            root = self.new_buffer(want)
            self._reorder(f"{node.name} out", have, buffer, want, root)
        root.space, root.index, root.last = "output", number, END

    def append_guards(self) -> None:
        """Let the numbers that guards look at lie side by side, kept until all else has run."""
        for (kind, holds), buffers in self.guarded.items():
            size_bytes = sum(buffer.size_bytes for buffer in buffers)
            whole = self._new_memory(size_bytes)
            offset_bytes = 0
            for buffer in buffers:
                buffer.move_into(whole, offset_bytes)
                offset_bytes += buffer.size_bytes
            desc = row_major((size_bytes // torch.float32.itemsize,), torch.float32)
            numbers = Result(desc)  # read, and left as they are
            template = TorchTemplate(_noting(self.failed, kind, holds), "", into=True, args=(numbers, numbers))
            self.steps.append(Step(kind, None, template, [], (whole, desc)))

    def settle_takeovers(self) -> None:
        """Let results take over the memory of inputs that nothing reads later."""
        for step, source, result, beside in self.takeovers:
            root = source.root
            free = root.space == "arena" and root.last == step and root.size_bytes == result.size_bytes
            if free and root is not result.root and all(other.root is not root for other in beside):
                root.move_into(result, 0)


def build_program(
    operations: Sequence[Operation],
    choice: Sequence[Candidate],
    inputs: Mapping[fx.Node, Layout],
    outputs: Sequence[tuple[fx.Node, TensorSpec]],
    weights: WeightStore,
) -> Program:
    """Return the program that computes the operations with the chosen candidates.

    inputs   region inputs in order, with the layout each arrives in
    outputs  region outputs in order, with the tensor each becomes
    weights  where prepacked weights are kept, shared between programs
    """
    schedule = Schedule(weights)
    for number, (node, desc) in enumerate(inputs.items()):
        buffer = Buffer(desc.size_bytes, -1, END, "input", number)
        schedule.buffers.append(buffer)
        schedule.places[node] = [(desc, buffer)]
    for operation, candidate in zip(operations, choice, strict=True):
        schedule.compute(operation, candidate)
    for number, (node, spec) in enumerate(outputs):
        schedule.leave(number, node, eager_layout(spec))
    schedule.append_guards()
    schedule.settle_takeovers()
    slots, arena_bytes = assign_slots(schedule.buffers)
    constants = Prepacked(weights)
    calls = [_call(step, slots, constants) for step in schedule.steps]
    specs = [OutputSpec(spec.shape, spec.strides, spec.dtype, spec.grows) for _, spec in outputs]
    return Program(calls, specs, constants.tensors, arena_bytes, schedule.failed)


def _call(step: Step, slots: Mapping[Buffer, Slot], constants: Prepacked) -> Call:
    give_way()

    def place(argument: Argument) -> tuple[Slot, MemoryDesc]:
        return _place(argument, step, slots, constants)

    return materialise(step.template, step.name, step.operation, len(step.srcs), place)


def _place(
    argument: Argument, step: Step, slots: Mapping[Buffer, Slot], constants: Prepacked
) -> tuple[Slot, MemoryDesc]:
    """Where an argument of step's call lies, and the layout it is seen in."""
    match argument:
        case Operand(index, desc, offset_bytes):
            return slots[step.srcs[index][0]].behind(offset_bytes), desc or in_memory(step.srcs[index][1])
        case Result(desc, offset_bytes):
            return slots[step.dst[0]].behind(offset_bytes), desc or in_memory(step.dst[1])
        case Temporary(index, desc, offset_bytes):
            return slots[step.temporaries[index]].behind(offset_bytes), desc
        case Weights():
            return constants.slot(argument), argument.desc
        case Scratchpad(desc):
            assert step.scratchpad is not None
            return slots[step.scratchpad], desc


def _noting(failed: set[str], kind: str, holds: Holds) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A call that notes the kind where its guard does not hold; it writes to its last argument what is there."""

    def look(numbers: torch.Tensor, _: torch.Tensor) -> None:
        if not holds(numbers):
            failed.add(kind)

    return look
