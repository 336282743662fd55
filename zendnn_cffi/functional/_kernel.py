"""One prepared computation: a primitive, and the reorders between the layouts it wants and those its operands have.

    operand --[reorder]--> workspace --> primitive --> workspace --[reorder]--> result

Operands that already lie as the primitive wants are passed as they are. Prepared kernels are kept, least recently used
out first, so that a repeated call costs a few pointer assignments. Each running call takes a set of memory handles of
its own: threads never share one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from zendnn_cffi.errors import ZenDNNError, check
from zendnn_cffi.locks import making
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SCRATCHPAD, ARG_SRC
from zendnn_cffi.primitives.handles import native
from zendnn_cffi.primitives.labels import Label, primitive_label, profiler
from zendnn_cffi.primitives.memory import Memory, MemoryDesc, default_stream
from zendnn_cffi.primitives.primitive import Primitive, PrimitiveDesc
from zendnn_cffi.recent import Recent
from zendnn_cffi.runtime import huge_pages
from zendnn_cffi.runtime.huge_pages import ALIGNMENT_BYTES

_KEPT_WORKSPACE_BYTES = 64 << 20
_IDLE_CONTEXTS = 8


class Kernel:
    """pd with the user's layouts: ``run`` takes addresses of buffers in those layouts, by argument id.

    reads_dst  whether the primitive also reads what dst holds (a sum post-op)
    """

    def __init__(self, pd: PrimitiveDesc, layouts: Mapping[int, MemoryDesc], *, reads_dst: bool = False) -> None:
        self.pd, primitive = _created(pd)
        pd = self.pd
        self.layouts = dict(layouts)
        self.workspace_bytes = 0
        self._idle: list[_Context] = []
        self._steps: list[tuple[Primitive, dict[int, tuple[Any, MemoryDesc]]]] = []
        expected = pd.expected_args
        main: dict[int, tuple[Any, MemoryDesc]] = {}
        after: list[tuple[Primitive, dict[int, tuple[Any, MemoryDesc]]]] = []
        for arg, user in self.layouts.items():
            wanted = expected.get(arg, user)
            if wanted == user:
                main[arg] = (arg, user)
                continue
            offset = self._reserve(wanted.size_bytes)
            main[arg] = (("workspace", offset), wanted)
            if arg != ARG_DST or reads_dst:
                self._steps.append(
                    (_reorder(user, wanted), {ARG_SRC: (arg, user), ARG_DST: (("workspace", offset), wanted)})
                )
            if arg == ARG_DST:
                after.append((_reorder(wanted, user), {ARG_SRC: (("workspace", offset), wanted), ARG_DST: (arg, user)}))
        missing = set(expected) - set(main) - {ARG_SCRATCHPAD}
        assert not missing, f"{pd}: no operand for {missing}"
        scratch = expected.get(ARG_SCRATCHPAD)
        if scratch is not None and scratch.size_bytes:
            main[ARG_SCRATCHPAD] = (("workspace", self._reserve(scratch.size_bytes)), scratch)
        self._steps.append((primitive, main))
        self._steps += after
        for primitive, args in self._steps:
            own = primitive.pd.expected_args.get(ARG_SCRATCHPAD)
            if ARG_SCRATCHPAD not in args and own is not None and own.size_bytes:
                args[ARG_SCRATCHPAD] = (("workspace", self._reserve(own.size_bytes)), own)

    @property
    def implementation(self) -> str:
        return self.pd.implementation

    @property
    def reorders(self) -> int:
        """How many copies between layouts a run makes."""
        return len(self._steps) - 1

    def _reserve(self, size: int) -> int:
        offset = self.workspace_bytes
        self.workspace_bytes += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return offset

    def run(self, addresses: Mapping[int, int]) -> None:
        """Execute with buffers at these addresses, one per layout; the caller keeps them alive until this returns."""
        try:
            context = self._idle.pop()
        except IndexError:
            context = _Context(self._steps)
        workspace = _take_workspace(self.workspace_bytes) if self.workspace_bytes else None
        try:
            context.run(addresses, workspace)
        finally:
            if workspace is not None:
                _give_back_workspace(workspace)
        if len(self._idle) < _IDLE_CONTEXTS:
            self._idle.append(context)


class _Context:
    """Memory handles and argument arrays for one running call."""

    def __init__(self, steps: list[tuple[Primitive, dict[int, tuple[Any, MemoryDesc]]]]) -> None:
        n = native()
        self._bound: list[tuple[Any, int | None, int]] = []  # handle, operand's argument id (None: workspace), offset
        self._calls = []
        self._steps = steps
        self._labels: list[Label] = []
        for primitive, args in steps:
            pairs = []
            for arg, (where, desc) in args.items():
                memory = Memory(desc)
                self._bound.append(
                    (memory.handle, None, where[1]) if isinstance(where, tuple) else (memory.handle, where, 0)
                )
                pairs.append((arg, memory.handle))
            self._calls.append((primitive.handle, len(pairs), n.ffi.new("zendnn_exec_arg_t[]", pairs), primitive))

    def run(self, addresses: Mapping[int, int], workspace: torch.Tensor | None) -> None:
        n = native()
        lib, ffi = n.lib, n.ffi
        set_handle, execute, cast = lib.zendnn_memory_set_data_handle, lib.zendnn_primitive_execute, ffi.cast
        base = workspace.data_ptr() if workspace is not None else 0
        for handle, operand, offset in self._bound:
            address = base + offset if operand is None else addresses[operand]
            check(set_handle(handle, cast("void *", address)), "binding an operand")
        stream = default_stream().handle
        if profiler._is_profiler_enabled:
            self._run_labelled(stream, execute)
        else:
            for primitive, count, args, owner in self._calls:
                status = execute(primitive, stream, count, args)
                if status:
                    check(status, f"executing {owner.pd}")
        lib.zendnn_stream_wait(stream)

    def _run_labelled(self, stream: Any, execute: Any) -> None:
        """Run each primitive as an event of torch.profiler."""
        if not self._labels:
            self._labels = [primitive_label(p.pd, {a: d for a, (_, d) in args.items()}) for p, args in self._steps]
        for label, (primitive, count, args, owner) in zip(self._labels, self._calls, strict=True):
            with label.event():
                status = execute(primitive, stream, count, args)
            check(status, f"executing {owner.pd}")


def _created(pd: PrimitiveDesc) -> tuple[PrimitiveDesc, Primitive]:
    """Return the primitive of a descriptor, or of the next implementation: some are chosen that cannot be created."""
    try:
        return pd, Primitive(pd)
    except ZenDNNError:
        for other in pd.implementations():
            if other.implementation != pd.implementation:
                with contextlib.suppress(ZenDNNError):
                    return other, Primitive(other)
        raise


def _reorder(src: MemoryDesc, dst: MemoryDesc) -> Primitive:
    return Primitive(PrimitiveDesc.reorder(src, dst))


_thread = threading.local()


def _take_workspace(size: int) -> torch.Tensor:
    """Return this thread's workspace, or a larger one; nobody else has it until it is given back."""
    held: torch.Tensor | None = getattr(_thread, "workspace", None)
    _thread.workspace = None
    if held is not None and held.numel() >= size:
        return held
    with torch.inference_mode(False):
        if size > _KEPT_WORKSPACE_BYTES:  # for one call: getting huge pages took 150 or 220 ms where this takes 180
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        return huge_pages.allocate(size)


def _give_back_workspace(workspace: torch.Tensor) -> None:
    if workspace.numel() <= _KEPT_WORKSPACE_BYTES:
        _thread.workspace = workspace


# ---- the cache of prepared kernels


class KernelCache:
    """Bounded least-recently-used map from a call's signature to its Kernel."""

    def __init__(self, capacity: int = 512) -> None:
        self._recent: Recent[Kernel] = Recent(capacity)
        self.hits = self.misses = 0

    @property
    def capacity(self) -> int:
        return self._recent.most

    def get(self, key: Hashable, build: Callable[[], Kernel]) -> Kernel:
        key = (key, torch.get_num_threads())
        kernel = self._recent.get(key)
        if kernel is not None:
            self.hits += 1
            return kernel
        self.misses += 1
        with making():
            kernel = build()
        return self._recent.keep(key, kernel)

    def set_capacity(self, capacity: int) -> None:
        self._recent.most = capacity

    def clear(self) -> None:
        self._recent.clear()

    def __len__(self) -> int:
        return len(self._recent)


CACHE = KernelCache()
