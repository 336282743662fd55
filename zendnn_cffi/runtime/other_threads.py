"""A program for another number of threads: the same calls in the same memory, with the same bits as result.

A primitive is made for a number of threads. The same implementations with the same layouts are made again for another
one, so nothing is chosen, measured or packed. Some share out a sum among their threads, and round otherwise with fewer:
those calls keep their threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from zendnn_cffi.engine.openmp import computing_with
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_DST_ITER, ARG_DST_ITER_C, ARG_SCRATCHPAD
from zendnn_cffi.primitives.labels import Label
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import Primitive
from zendnn_cffi.runtime.calls import Call, PrimitiveCall, TorchCall
from zendnn_cffi.runtime.context import Context
from zendnn_cffi.runtime.gemm_call import GemmCall
from zendnn_cffi.runtime.loop_call import LoopCall
from zendnn_cffi.runtime.places import Slot, TensorView
from zendnn_cffi.runtime.program import Program
from zendnn_cffi.runtime.sliced_program import SlicedProgram
from zendnn_cffi.values import dataclass

_ALIGNMENT = 64


def for_threads(
    program: Program | SlicedProgram, threads: int, inputs: Sequence[torch.Tensor]
) -> Program | SlicedProgram | None:
    """Return a program that computes the same bits with so many threads; None where it would not.

    program  for PyTorch's number of threads of now
    inputs   what both are compared on, call by call
    Run it inside zendnn_cffi.engine.openmp.computing_with(threads): calls into PyTorch and AOCL-BLIS obey that.
    """
    if isinstance(program, Program):
        return _whole(program, threads, inputs)
    part = _whole(program.program, threads, program.first_slice(inputs))
    return None if part is None else SlicedProgram(part, program.slice_size, program.outputs)


def _whole(program: Program, threads: int, inputs: Sequence[torch.Tensor]) -> Program | None:
    if any(spec.grows for spec in program.outputs):
        return None
    arena_bytes, calls = program.arena_bytes, list[Call]()
    with computing_with(threads):
        for call in program.calls:
            made, needed = _made_again(call, program.arena_bytes)
            calls.append(made)
            arena_bytes = max(arena_bytes, needed)
    made_again = Program(calls, program.outputs, program.constants, arena_bytes)
    differing = _differing(program, made_again, threads, inputs)
    if differing:
        made_again.close()
        usual = torch.get_num_threads()
        kept = [KeptThreads(was, usual) if i in differing else calls[i] for i, was in enumerate(program.calls)]
        made_again = Program(kept, program.outputs, program.constants, arena_bytes)
        if _differing(program, made_again, threads, inputs):
            made_again.close()
            return None
    made_again.free_idle()  # both ran at once, in an arena each: from now on they take turns in one
    return made_again


@dataclass(frozen=True)
class KeptThreads:
    """A call that computes with its own number of threads, whatever the program around it takes."""

    call: Call
    threads: int

    @property
    def name(self) -> str:
        return self.call.name

    @property
    def kind(self) -> str:
        return self.call.kind

    @property
    def implementation(self) -> str:
        return self.call.implementation

    @property
    def flops(self) -> int:
        return self.call.flops

    @property
    def dtype(self) -> torch.dtype | None:
        return self.call.dtype

    @property
    def bytes_moved(self) -> int:
        return self.call.bytes_moved

    @property
    def label(self) -> Label:
        return self.call.label

    def bind(self, context: Context) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """As the call's, inside computing_with(threads)."""
        return self._run, self.call.bind(context)

    def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        with computing_with(self.threads):
            return function(*arguments)


def _made_again(call: Call, arena_bytes: int) -> tuple[Call, int]:
    """The call for the number of threads of now, and how large an arena it needs.

    A scratchpad that grows lies behind the arena there was.
    """
    start = -(-arena_bytes // _ALIGNMENT) * _ALIGNMENT
    if isinstance(call, LoopCall):
        return _loop_made_again(call, start)
    pd = call.primitive.pd.made_again() if isinstance(call, PrimitiveCall) else None
    if not isinstance(call, PrimitiveCall) or pd is None:
        return call, 0
    args, needed, end = dict(call.args), pd.scratchpad_desc, 0
    if needed is None:
        args.pop(ARG_SCRATCHPAD, None)
    elif ARG_SCRATCHPAD in args and args[ARG_SCRATCHPAD][1].size_bytes >= needed.size_bytes:
        args[ARG_SCRATCHPAD] = args[ARG_SCRATCHPAD][0], needed
    else:
        args[ARG_SCRATCHPAD], end = (Slot("arena", 0, start), needed), start + needed.size_bytes
    return replace(call, primitive=Primitive(pd), args=args), end


def _loop_made_again(call: LoopCall, start: int) -> tuple[LoopCall, int]:
    pds = [primitive.pd.made_again() for primitive, _ in call.steps]
    found = [Primitive(pd) for pd in pds if pd is not None]
    if len(found) != len(pds):
        return call, 0
    made, reach = call.with_primitives(found, Slot("arena", 0, start))
    return made, start + reach if reach else 0


def _differing(program: Program, other: Program, threads: int, inputs: Sequence[torch.Tensor]) -> set[int]:
    """Which calls of the other program, with so many threads, leave other bits; both run side by side.

    After a call that does, the other goes on from the first one's bits.
    """
    found = set()
    with program.running(inputs) as mine, other.running(inputs) as theirs:
        for number, call in enumerate(program.calls):
            function, arguments = mine.calls[number]
            function(*arguments)
            function, arguments = theirs.calls[number]
            with computing_with(threads):
                function(*arguments)
            for view in _results(call):
                ours, others = mine.tensor(view), theirs.tensor(view)
                if not torch.equal(_bits(ours), _bits(others)):
                    found.add(number)
                    others.copy_(ours)
    return found


def _results(call: Call) -> list[TensorView]:
    """What a call writes: its elements alone, as a slice of a concatenation spans bytes that are others'."""
    match call:
        case PrimitiveCall():
            return [_view(*call.args[arg]) for arg in (ARG_DST, ARG_DST_ITER, ARG_DST_ITER_C) if arg in call.args]
        case LoopCall():
            return [_view(*written) for written in call.written]
        case GemmCall():
            m, _, n = call.gemm.sizes
            return [TensorView(call.dst, (m, n), (n, 1), call.gemm.result)]
        case TorchCall():
            return [call.dst]
    raise TypeError(f"{type(call).__name__} is no call of a program")


def _view(slot: Slot, desc: MemoryDesc) -> TensorView:
    if desc.strides is None or desc.dtype is None:  # blocks lie together
        return TensorView(slot, (desc.size_bytes,), (1,), torch.uint8)
    return TensorView(slot, desc.dims, desc.strides, desc.dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)  # NaN equals itself here, and 0.0 is not -0.0
