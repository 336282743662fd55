"""A loop over primitives as one call of a program: what recurs from one step of a sequence to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from zendnn_cffi.engine.library import load
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SCRATCHPAD, ARG_SRC
from zendnn_cffi.primitives.labels import Label, shaped
from zendnn_cffi.primitives.memory import Memory, MemoryDesc
from zendnn_cffi.primitives.primitive import Primitive
from zendnn_cffi.runtime.alone import Alone, Bound, is_small
from zendnn_cffi.runtime.context import Context, data_handle_setter
from zendnn_cffi.runtime.places import Slot
from zendnn_cffi.values import dataclass


@dataclass(frozen=True)
class Part:
    """What a primitive of a loop sees of one of the loop's arguments.

    argument       number of the argument
    desc           how the part is laid out
    offset_bytes   where in the argument the part of the first round begins
    advance_bytes  how much further on that of the next round begins; negative: before it
    """

    argument: int
    desc: MemoryDesc
    offset_bytes: int = 0
    advance_bytes: int = 0

    def reaches(self, rounds: int) -> tuple[int, int]:
        """The first byte of the argument that is seen in any of so many rounds, and the one behind the last."""
        last = self.offset_bytes + (rounds - 1) * self.advance_bytes
        return min(self.offset_bytes, last), max(self.offset_bytes, last) + self.desc.size_bytes


@dataclass(frozen=True)
class LoopCall:
    """Primitives that run in turn, in so many rounds.

    steps  each primitive, and the part of an argument that each argument id stands for
    args   where each argument of the loop lies, and how all of it is laid out
    Raises ValueError where a part lies beyond its argument in any round: the library would not look.
    """

    name: str
    steps: tuple[tuple[Primitive, dict[int, Part]], ...]
    args: tuple[tuple[Slot, MemoryDesc], ...]
    rounds: int
    kind: str = ""
    flops: int = 0

    def __post_init__(self) -> None:
        for primitive, parts in self.steps:
            for arg, desc in primitive.pd.expected_args.items():
                part = parts.get(arg)
                if part is None or part.desc.size_bytes < desc.size_bytes:
                    raise ValueError(f"{self.name}: argument {arg} of {primitive.pd} is missing or too small")
            for part in parts.values():
                first, end = part.reaches(self.rounds)
                if first < 0 or end > self.args[part.argument][1].size_bytes:
                    raise ValueError(f"{self.name}: {part} lies beyond its argument in one of {self.rounds} rounds")

    @property
    def implementation(self) -> str:
        """Of each primitive."""
        return " ".join(dict.fromkeys(primitive.pd.implementation for primitive, _ in self.steps))

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the first primitive's source."""
        return self.steps[0][1][ARG_SRC].desc.dtype

    @property
    def bytes_moved(self) -> int:
        """Bytes that are read and written in all rounds."""
        seen = (p.desc.used_bytes for _, parts in self.steps for arg, p in parts.items() if arg != ARG_SCRATCHPAD)
        return self.rounds * sum(seen)

    @property
    def label(self) -> Label:
        """What a trace shows: the arguments as wholes."""
        read = tuple(shaped(desc.dims, desc.dtype or torch.uint8) for _, desc in self.args)
        return Label(f"zendnn::{self.kind} {self.implementation}", read, self.name)

    @property
    def written(self) -> list[tuple[Slot, MemoryDesc]]:
        """What primitives write: all of an argument where the part moves on."""
        found = []
        for _, parts in self.steps:
            part = parts[ARG_DST]
            found.append(self.args[part.argument] if part.advance_bytes else (self._begin(part), part.desc))
        return found

    def with_primitives(self, primitives: list[Primitive], scratchpad: Slot) -> tuple[LoopCall, int]:
        """The same loop by other primitives, and how far they reach into what begins at the slot.

        scratchpad  where temporary memory lies from now on, if theirs does not fit where it lay
        """
        wanted = [p.pd.scratchpad_desc for p in primitives]
        largest = max((d for d in wanted if d is not None), key=lambda desc: desc.size_bytes, default=None)
        places = (part.argument for _, parts in self.steps for arg, part in parts.items() if arg == ARG_SCRATCHPAD)
        number, args, needed = next(places, len(self.args)), list(self.args), 0
        if largest is not None and (number == len(args) or args[number][1].size_bytes < largest.size_bytes):
            args[number:] = [(scratchpad, largest), *args[number + 1 :]]
            needed = largest.size_bytes
        steps = []
        for primitive, desc, (_, parts) in zip(primitives, wanted, self.steps, strict=True):
            own = {arg: part for arg, part in parts.items() if arg != ARG_SCRATCHPAD}
            steps.append((primitive, own if desc is None else {**own, ARG_SCRATCHPAD: Part(number, desc)}))
        return replace(self, steps=tuple(steps), args=tuple(args)), needed

    def bind(self, context: Context) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A Python function with C's convention: 0 is success."""
        distinct = dict.fromkeys(part for _, parts in self.steps for part in parts.values())
        execute = load().lib.zendnn_primitive_execute
        memories = {
            part: Memory(part.desc) if part.advance_bytes else context.memory(self._begin(part), part.desc)
            for part in distinct
        }
        context.keep_alive += memories.values()
        calls: list[Bound] = [
            (execute, context.execution(primitive, {arg: memories[part] for arg, part in parts.items()}))
            for primitive, parts in self.steps
        ]
        small = [is_small(primitive.pd, {arg: p.desc for arg, p in parts.items()}) for primitive, parts in self.steps]
        alone = Alone(calls, small)
        moving = [part for part in distinct if part.advance_bytes]
        pointers = [(memories[part].handle, self._begin(part), part.advance_bytes) for part in moving]
        return self._run, (context, alone, pointers)

    def _begin(self, part: Part) -> Slot:
        """Where the part of the first round lies."""
        return self.args[part.argument][0].behind(part.offset_bytes)

    def _run(self, context: Context, alone: Alone, pointers: list[tuple[Any, Slot, int]]) -> int:
        point = data_handle_setter()
        places = [(handle, context.address(slot), advance) for handle, slot, advance in pointers]
        sequence = alone.sequence()
        try:
            for number in range(self.rounds):
                for handle, address, advance in places:
                    status = point(handle, address + number * advance)
                    if status:
                        return int(status)
                for function, arguments in sequence:
                    status = function(*arguments)
                    if status:
                        return int(status)
        finally:
            alone.restore(sequence)
        return 0
