"""What one running call of a program needs for itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch

from zendnn_cffi.engine.library import load
from zendnn_cffi.primitives.memory import Memory, MemoryDesc
from zendnn_cffi.primitives.primitive import Primitive, Stream
from zendnn_cffi.runtime import arenas
from zendnn_cffi.runtime.alone import Alone, Bound
from zendnn_cffi.runtime.places import Slot, TensorView
from zendnn_cffi.values import dataclass

_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


def data_handle_setter() -> Callable[[Any, int], int]:
    """The C function that points a memory handle at an address.

    It takes the address as an integer: a pointer made for each call takes as long as the call.
    """
    library = load()
    setter: Callable[[Any, int], int] = library.ffi.cast(
        "int (*)(void *, uintptr_t)", library.lib.zendnn_memory_set_data_handle
    )
    return setter


@dataclass(eq=False)
class Context:
    """What one running call needs for itself: an arena, a stream, memory handles, and the tensors of this run.

    lease    the arena's owner, taken while a call runs
    alone    the calls, and as a run makes them: small ones by one thread
    moving   memory handles of inputs and outputs: space, index, offset in bytes, handle
    pointed  the address that each of them has
    """

    constants: Sequence[torch.Tensor]
    lease: arenas.Arena
    stream: Stream = field(default_factory=Stream)
    inputs: Sequence[torch.Tensor] = ()
    outputs: list[torch.Tensor] = field(default_factory=list)
    keep_alive: list[Any] = field(default_factory=list)
    alone: Alone = field(default_factory=Alone)
    moving: list[tuple[str, int, int, Any]] = field(default_factory=list)
    pointed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arena = self.lease.memory
        self._arena_pointer = self.arena.data_ptr()
        self._memories: dict[tuple[Slot, MemoryDesc], Memory] = {}

    @property
    def calls(self) -> Sequence[Bound]:
        """What the calls of the program are here, one by one."""
        return self.alone.whole

    def close(self) -> None:
        """Give up the arena and the handles now: calls may refer back to this context."""
        self.alone, self.keep_alive, self.moving, self._memories = Alone(), [], [], {}
        self.arena = _NOTHING
        del self.lease

    def memory(self, slot: Slot, desc: MemoryDesc) -> Memory:
        """The memory handle of a slot seen through desc; one per pair, shared by the calls that read it."""
        memory = self._memories.get((slot, desc))
        if memory is None:
            fixed = None if slot.moves else self.address(slot)
            memory = self._memories[slot, desc] = Memory(desc, fixed)
            if fixed is None:
                self.moving.append((slot.space, slot.index, slot.offset_bytes, memory.handle))
        return memory

    def execution(self, primitive: Primitive, memories: Mapping[int, Memory]) -> tuple[Any, ...]:
        """The arguments of zendnn_primitive_execute, kept alive here; memories: by argument id."""
        exec_args = load().ffi.new("zendnn_exec_arg_t[]", len(memories))
        for entry, (arg, memory) in zip(exec_args, memories.items(), strict=True):
            entry.arg, entry.memory = arg, memory.handle
        self.keep_alive += [exec_args, primitive]
        return primitive.handle, self.stream.handle, len(memories), exec_args

    def address(self, slot: Slot) -> int:
        """Where the slot's bytes begin: in this run, where its memory moves between runs."""
        if slot.space == "arena":
            return self._arena_pointer + slot.offset_bytes
        held = self.outputs if slot.space == "output" else self.inputs if slot.space == "input" else self.constants
        return held[slot.index].data_ptr() + slot.offset_bytes

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
