"""A Program: a flat list of calls into ZenDNN and torch whose arguments are all built beforehand.

    inputs (tensors) --point--> [call, call, call, ...] --> outputs (new tensors)

Everything between the inputs and the outputs lives in one arena, at offsets that the caller planned. What a running
call needs for itself (memory handles, stream) is an execution context on an arena; contexts are pooled, so threads that
call the same program at once never share one, and a program called by one thread builds one context. Arenas are shared
by programs that do not run at once.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from zendnn_cffi.errors import ZenDNNError, check
from zendnn_cffi.primitives.labels import Label, profiler
from zendnn_cffi.runtime import arenas, recycled
from zendnn_cffi.runtime.alone import Alone
from zendnn_cffi.runtime.calls import Call, PrimitiveCall, TorchCall
from zendnn_cffi.runtime.context import _NOTHING, Context, data_handle_setter
from zendnn_cffi.values import dataclass


def _nothing() -> torch.Tensor:
    return _NOTHING


@dataclass(frozen=True)
class OutputSpec:
    """An output tensor, a new one in each run.

    grows  by the call that computes it: its shape is another one in each run (this one in the first)
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    grows: bool = False

    def maker(self) -> Callable[[], torch.Tensor]:
        """What makes the tensor of a run; of one that grows, an empty one in its place."""
        return _nothing if self.grows else recycled.results.maker(self.shape, self.strides, self.dtype)


class Program:
    """Run a planned list of calls.

    calls        in execution order; each knows its arguments as slots
    outputs      shapes, strides (elements) and dtypes of the tensors a run returns
    constants    prepacked weights and other tensors that never change, kept alive here
    arena_bytes  size of the arena that the slots' offsets fit in
    failed       calls that look whether the results may be used add to it what did not hold, in whichever run
    Raises       ZenDNNError naming the call when the library refuses one.
    """

    slices = 1  # how often a run makes each call

    def __init__(
        self,
        calls: Sequence[Call],
        outputs: Sequence[OutputSpec],
        constants: Sequence[torch.Tensor] = (),
        arena_bytes: int = 0,
        failed: set[str] | None = None,
    ) -> None:
        self.calls = tuple(calls)
        self.outputs = tuple(outputs)
        self.constants = tuple(constants)
        self.arena_bytes = arena_bytes
        self.failed = set() if failed is None else failed
        self._set_data_handle = data_handle_setter()
        self._makers = [spec.maker() for spec in self.outputs]
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
        outputs = [make() for make in self._makers]
        for output, source, allocate in self._growing:
            outputs[output] = allocate(inputs[source])
        return outputs

    def run_into(self, inputs: Sequence[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Compute into given outputs, which must have the shapes, strides and dtypes of `outputs`.

        Those that grow are replaced in the list.
        """
        context = self._enter(inputs, outputs)
        try:
            if profiler._is_profiler_enabled:
                self._run_labelled(context)
            else:
                self._run(context)
        except BaseException:
            self._abandon(context)
            raise
        self._leave(context)

    def _run(self, context: Context) -> None:
        alone = context.alone
        sequence = alone.sequence()
        try:
            for function, arguments in sequence:
                if function(*arguments):
                    alone.restore(sequence)
                    self._raise(context)
        except BaseException:
            alone.restore(sequence)
            raise

    def _run_labelled(self, context: Context) -> None:
        """Run each call as an event of torch.profiler."""
        if self._labels is None:
            self._labels = [call.label for call in self.calls]
        alone = context.alone
        for label, is_small, (function, arguments) in zip(self._labels, alone.small, alone.whole, strict=True):
            with alone.with_its_threads(is_small), label.event():
                status = function(*arguments)
            if status:
                self._raise(context)

    def run_timed(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
        """Return the outputs, and the wall time of each call in ns."""
        times_ns = []
        with self.running(inputs) as context:
            outputs, alone = context.outputs, context.alone
            for call, is_small, (function, arguments) in zip(self.calls, alone.small, alone.whole, strict=True):
                with alone.with_its_threads(is_small):
                    start = time.perf_counter_ns()
                    status = function(*arguments)
                    times_ns.append(time.perf_counter_ns() - start)
                check(status or 0, f"{call.name}: executing {call.kind}")
        return outputs, times_ns

    @contextmanager
    def running(self, inputs: Sequence[torch.Tensor]) -> Iterator[Context]:
        """A run on inputs whose calls, context.calls, the caller makes one by one."""
        context = self._enter(inputs, self.new_outputs(inputs))
        try:
            yield context
        except BaseException:
            self._abandon(context)
            raise
        self._leave(context)

    def _enter(self, inputs: Sequence[torch.Tensor], outputs: list[torch.Tensor]) -> Context:
        try:
            context = self._idle.pop()
        except IndexError:
            context = self._new_context()
        else:
            if not context.lease.take():
                context = self._other_context(context)
        self.last_used = next(arenas.clock)
        context.inputs, context.outputs = inputs, outputs
        spaces, pointed = {"input": inputs, "output": outputs}, context.pointed
        for number, (space, index, offset, handle) in enumerate(context.moving):
            address = spaces[space][index].data_ptr() + offset
            if pointed[number] != address:
                pointed[number] = address
                self._set_data_handle(handle, address)
        return context

    def _leave(self, context: Context) -> None:
        context.inputs, context.outputs = (), []
        context.lease.give_back()
        self._idle.append(context)
        if self._closed:
            self.free_idle()

    def _abandon(self, context: Context) -> None:
        """A run ended with an exception: what it left behind is not used again."""
        lease = context.lease
        self._drop(context)
        lease.give_back()

    def _other_context(self, context: Context) -> Context:
        """A context in place of one whose arena another program is using, or will never use again."""
        waiting = []
        found: Context | None = None
        while found is None:
            if context.lease.is_outgrown:
                self._drop(context)
            else:
                waiting.append(context)
            try:
                context = self._idle.pop()
            except IndexError:
                break
            if context.lease.take():
                found = context
        self._idle += waiting
        return found or self._new_context()

    def _drop(self, context: Context) -> None:
        self._contexts.discard(context)
        context.close()

    @property
    def contexts(self) -> int:
        """How many contexts there are: as many as calls of this program ran at once."""
        return len(self._contexts)

    @property
    def is_running(self) -> bool:
        """Whether a call is under way."""
        return len(self._contexts) > len(self._idle)

    def free_idle(self) -> None:
        """Give up the contexts that no call is using."""
        self._keep_idle(lambda context: False)

    def leave_outgrown(self) -> None:
        """Give up the contexts that no call is using whose arenas are outgrown."""
        self._keep_idle(lambda context: not context.lease.is_outgrown)

    def _keep_idle(self, is_kept: Callable[[Context], bool]) -> None:
        kept = []
        while self._idle:
            try:
                context = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if is_kept(context):
                kept.append(context)
            else:
                self._drop(context)
        self._idle += kept

    def close(self) -> None:
        """Keep no context any longer; calls that are running, and later ones, still work."""
        self._closed = True
        self.free_idle()

    def _new_context(self) -> Context:
        lease = arenas.taken(self.arena_bytes)
        try:
            context = Context(self.constants, lease)
            with torch.inference_mode(False):  # tensors made there could not be written to elsewhere
                bound = [call.bind(context) for call in self.calls]
            small = [isinstance(call, PrimitiveCall) and call.is_small for call in self.calls]
            context.alone = Alone(bound, small)
            context.pointed = [-1] * len(context.moving)
        except BaseException:
            lease.give_back()
            raise
        self._contexts.add(context)
        return context

    def _raise(self, context: Context) -> None:
        """Find the call that fails by running the list again, one status at a time."""
        for call, (function, arguments) in zip(self.calls, context.calls, strict=True):
            check(function(*arguments) or 0, f"{call.name}: executing {call.kind} ({call.implementation})")
        raise ZenDNNError("a primitive failed once and not again: please report this with ZENDNN_CFFI_LOG=DEBUG output")
