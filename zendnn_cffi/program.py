"""A Program: a flat list of calls into ZenDNN and torch whose arguments are all built beforehand.

    inputs (tensors) --point--> [call, call, call, ...] --> outputs (new tensors)

Everything between the inputs and the outputs lives in one arena, at offsets that the caller planned. What a running
call needs for itself (arena, memory handles, stream) is an execution context; contexts are pooled, so threads that call
the same program at once never share one, and a program called by one thread builds one context.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zendnn_cffi import arenas, huge_pages, recycled
from zendnn_cffi.calls import Call, Slot, TensorView, TorchCall
from zendnn_cffi.errors import ZenDNNError, check
from zendnn_cffi.labels import Label, profiler
from zendnn_cffi.library import load
from zendnn_cffi.memory import Memory, MemoryDesc
from zendnn_cffi.primitive import Stream

_NOTHING = torch.empty(0, device="cpu")


@dataclass(frozen=True)
class OutputSpec:
    """An output tensor, a new one in each run.

    grows  by the call that computes it: its shape is another one in each run (this one in the first)
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    grows: bool = False


@dataclass(eq=False)
class Context:
    """What one running call needs for itself: an arena, a stream, memory handles, and the tensors of this run."""

    constants: Sequence[torch.Tensor]
    arena_bytes: int
    stream: Stream = field(default_factory=Stream)
    inputs: Sequence[torch.Tensor] = ()
    outputs: list[torch.Tensor] = field(default_factory=list)
    keep_alive: list[Any] = field(default_factory=list)
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)
    moving: list[tuple[str, int, int, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        with torch.inference_mode(False):
            self.arena = huge_pages.allocate(self.arena_bytes)
        self._arena_pointer = self.arena.data_ptr()
        self._memories: dict[tuple[Slot, MemoryDesc], Memory] = {}

    def close(self) -> None:
        """Give up the arena and the handles now: calls may refer back to this context."""
        self.calls, self.keep_alive, self.moving, self._memories = [], [], [], {}
        self.arena = self.arena[:0].clone()

    def memory(self, slot: Slot, desc: MemoryDesc) -> Memory:
        """The memory handle of a slot seen through desc; one per pair, shared by the calls that read it."""
        memory = self._memories.get((slot, desc))
        if memory is None:
            fixed = None
            if slot.space == "constant":
                fixed = self.constants[slot.index].data_ptr() + slot.offset_bytes
            elif slot.space == "arena":
                fixed = self._arena_pointer + slot.offset_bytes
            memory = self._memories[slot, desc] = Memory(desc, fixed)
            if fixed is None:
                self.moving.append((slot.space, slot.index, slot.offset_bytes, memory.handle))
        return memory

    def tensor(self, view: TensorView) -> torch.Tensor:
        """The slot as a torch tensor."""
        slot = view.slot
        if view.grows:
            return (self.inputs if slot.space == "input" else self.outputs)[slot.index]
        spaces = {"input": self.inputs, "output": self.outputs, "constant": self.constants}
        base = self.arena if slot.space == "arena" else spaces[slot.space][slot.index]
        if base.dtype == torch.uint8 != view.dtype:  # bytes: the arena, packed constants
            start = slot.offset_bytes
            span = sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) + 1
            raw = base[start : start + span * view.dtype.itemsize].view(view.dtype)
            return raw.as_strided(view.shape, view.strides)
        if slot.offset_bytes == 0 and base.shape == view.shape and base.stride() == view.strides:
            return base
        offset = base.storage_offset() + slot.offset_bytes // view.dtype.itemsize
        return base.as_strided(view.shape, view.strides, offset)


class Program:
    """Run a planned list of calls.

    calls        in execution order; each knows its arguments as slots
    outputs      shapes, strides (elements) and dtypes of the tensors a run returns
    constants    prepacked weights and other tensors that never change, kept alive here
    arena_bytes  size of the arena that the slots' offsets fit in
    Raises       ZenDNNError naming the call when the library refuses one.
    """

    slices = 1  # how often a run makes each call

    def __init__(
        self,
        calls: Sequence[Call],
        outputs: Sequence[OutputSpec],
        constants: Sequence[torch.Tensor] = (),
        arena_bytes: int = 0,
    ) -> None:
        self.calls = tuple(calls)
        self.outputs = tuple(outputs)
        self.constants = tuple(constants)
        self.arena_bytes = arena_bytes
        self._set_data_handle = load().lib.zendnn_memory_set_data_handle
        self._cast = load().ffi.cast
        self._void = load().ffi.typeof("void *")
        self._labels: list[Label] | None = None
        self._growing = [
            (call.dst.slot.index, call.srcs[0].slot.index, call.allocate)
            for call in self.calls
            if isinstance(call, TorchCall) and call.is_allocated_ahead and call.allocate is not None
        ]
        self._idle: list[Context] = []
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self._closed = False
        self.last_used = 0
        arenas.register(self)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs for these inputs, whose shapes, strides and dtypes must be those the program is for."""
        outputs = self.new_outputs(inputs)
        self.run_into(inputs, outputs)
        return outputs

    def new_outputs(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return uninitialised output tensors for a run on inputs.

        All at once, while the code that makes them is in cache. Those that grow by what is computed in the run are
        empty: it replaces them.
        """
        outputs = [
            _NOTHING if spec.grows else recycled.results.empty_strided(spec.shape, spec.strides, spec.dtype)
            for spec in self.outputs
        ]
        for output, source, allocate in self._growing:
            outputs[output] = allocate(inputs[source])
        return outputs

    def run_into(self, inputs: Sequence[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Compute into given outputs, which must have the shapes, strides and dtypes of `outputs`.

        Those that grow are replaced in the list.
        """
        context = self._enter(inputs, outputs)
        if profiler._is_profiler_enabled:
            self._run_labelled(context)
        else:
            for function, arguments in context.calls:
                if function(*arguments):
                    self._raise(context)
        self._leave(context)

    def _run_labelled(self, context: Context) -> None:
        """Run each call as an event of torch.profiler."""
        if self._labels is None:
            self._labels = [call.label for call in self.calls]
        for label, (function, arguments) in zip(self._labels, context.calls, strict=True):
            with label.event():
                status = function(*arguments)
            if status:
                self._raise(context)

    def run_timed(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
        """Return the outputs, and the wall time of each call in ns."""
        outputs = self.new_outputs(inputs)
        context = self._enter(inputs, outputs)
        times_ns = []
        for call, (function, arguments) in zip(self.calls, context.calls, strict=True):
            start = time.perf_counter_ns()
            status = function(*arguments)
            times_ns.append(time.perf_counter_ns() - start)
            check(status, f"{call.name}: executing {call.kind}")
        self._leave(context)
        return outputs, times_ns

    def _enter(self, inputs: Sequence[torch.Tensor], outputs: list[torch.Tensor]) -> Context:
        try:
            context = self._idle.pop()
        except IndexError:
            context = self._new_context()
        self.last_used = next(arenas.clock)
        context.inputs, context.outputs = inputs, outputs
        pointers = {"input": [t.data_ptr() for t in inputs], "output": [t.data_ptr() for t in outputs]}
        for space, index, offset, handle in context.moving:
            self._set_data_handle(handle, self._cast(self._void, pointers[space][index] + offset))
        return context

    def _leave(self, context: Context) -> None:
        context.inputs, context.outputs = (), []
        self._idle.append(context)
        if self._closed:
            self.free_idle()

    @property
    def arenas_bytes(self) -> int:
        """Bytes of the arenas of every context there is now."""
        return self.arena_bytes * len(self._contexts)

    def free_idle(self) -> int:
        """Give up the contexts that no call is using; return the bytes of their arenas."""
        freed = 0
        while self._idle:
            try:
                context = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            self._contexts.discard(context)
            context.close()
            freed += self.arena_bytes
        return freed

    def close(self) -> None:
        """Keep no context any longer; calls that are running, and later ones, still work."""
        self._closed = True
        self.free_idle()

    def _new_context(self) -> Context:
        arenas.make_room(self.arena_bytes)
        context = Context(self.constants, self.arena_bytes)
        self._contexts.add(context)
        with torch.inference_mode(False):  # tensors made there could not be written to elsewhere
            context.calls = [call.bind(context) for call in self.calls]
        return context

    def _raise(self, context: Context) -> None:
        """Find the call that fails by running the list again, one status at a time."""
        for call, (function, arguments) in zip(self.calls, context.calls, strict=True):
            check(function(*arguments) or 0, f"{call.name}: executing {call.kind} ({call.implementation})")
        raise ZenDNNError("a primitive failed once and not again: please report this with ZENDNN_CFFI_LOG=DEBUG output")
