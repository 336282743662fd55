"""What a program is made of: calls into ZenDNN and into torch, whose arguments are places in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from zendnn_cffi.engine.library import load
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SCRATCHPAD, ARG_SRC
from zendnn_cffi.primitives.labels import Label, primitive_label, shaped
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import Primitive
from zendnn_cffi.runtime.alone import is_small
from zendnn_cffi.runtime.context import Context
from zendnn_cffi.runtime.places import Slot, TensorView
from zendnn_cffi.values import dataclass


@dataclass(frozen=True)
class PrimitiveCall:
    """One execution of a ZenDNN primitive; args maps argument ids to where the memory lies and how it is laid out.

    Raises ValueError where the primitive needs a scratchpad and args has none, or a smaller one: the library would
    write through a null pointer.
    """

    name: str
    primitive: Primitive
    args: dict[int, tuple[Slot, MemoryDesc]]
    kind: str = ""
    flops: int = 0

    def __post_init__(self) -> None:
        pd = self.primitive.pd
        wanted = pd.scratchpad_desc if pd.attr.scratchpad == "user" else None
        given = self.args[ARG_SCRATCHPAD][1].size_bytes if ARG_SCRATCHPAD in self.args else 0
        if wanted is not None and given < wanted.size_bytes:
            raise ValueError(
                f"{self.name}: {pd} needs a scratchpad of {wanted.size_bytes} bytes, got {given or 'none'}: give"
                f" ARG_SCRATCHPAD a slot with pd.scratchpad_desc, or create it with Attr(scratchpad='library')"
            )

    @property
    def implementation(self) -> str:
        return self.primitive.pd.implementation

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the source."""
        return self.args[ARG_SRC][1].dtype if ARG_SRC in self.args else None

    @property
    def bytes_moved(self) -> int:
        """Bytes that are read and written: operands, weights and the result, which a sum post-op also reads."""
        total = sum(desc.used_bytes for arg, (_, desc) in self.args.items() if arg != ARG_SCRATCHPAD)
        if ARG_DST in self.args and any(entry[0] == "sum" for entry in self.primitive.pd.attr.post_ops):
            total += self.args[ARG_DST][1].used_bytes
        return total

    @property
    def is_small(self) -> bool:
        """Whether the calling thread computes it alone."""
        return is_small(self.primitive.pd, {arg: desc for arg, (_, desc) in self.args.items()})

    @property
    def label(self) -> Label:
        """What a trace shows."""
        return primitive_label(self.primitive.pd, {arg: desc for arg, (_, desc) in self.args.items()}, self.name)

    def bind(self, context: Context) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The C function and its arguments in this context."""
        memories = {arg: context.memory(slot, desc) for arg, (slot, desc) in self.args.items()}
        return load().lib.zendnn_primitive_execute, context.execution(self.primitive, memories)


@runtime_checkable
class Binds(Protocol):
    """A function of a TorchCall that prepares once per context what does not depend on the operands that move."""

    def bound(self, tensors: Sequence[torch.Tensor | None]) -> Callable[..., Any]:
        """The same function for such operands and result: None in place of those that move."""


def _write(function: Callable[..., Any], context: Context, tensors: list[Any]) -> None:
    function(*tensors)


@dataclass(frozen=True)
class TorchCall:
    """One plain PyTorch computation between the primitives: dst.copy_(function(*srcs)).

    With into, function(*srcs, dst) writes its result itself. Else what it returns becomes an output that grows; with
    into, such an output is allocate(first source).
    """

    name: str
    function: Callable[..., torch.Tensor]
    srcs: tuple[TensorView, ...]
    dst: TensorView
    kind: str = "torch"
    flops: int = 0
    implementation: str = "torch"
    into: bool = False
    allocate: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def is_allocated_ahead(self) -> bool:
        """Whether the output that grows is made before the run: from one of its inputs."""
        return self.allocate is not None and self.dst.grows and self.srcs[0].slot.space == "input"

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the first source."""
        return self.srcs[0].dtype if self.srcs else self.dst.dtype

    @property
    def bytes_moved(self) -> int:
        """Bytes of operands and result."""
        return sum(view.used_bytes for view in (*self.srcs, self.dst))

    @property
    def label(self) -> Label:
        """What a trace shows."""
        return Label(f"torch::{self.kind}", tuple(shaped(v.shape, v.dtype) for v in self.srcs), self.name)

    def bind(self, context: Context) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A Python function with C's convention: 0 is success. Tensors that stay where they are, are made once."""
        views = (*self.srcs, self.dst)
        tensors = [None if view.slot.moves else context.tensor(view) for view in views]
        moving = [(index, view) for index, view in enumerate(views) if view.slot.moves]
        if self.dst.grows and not self.is_allocated_ahead:
            return self._run, (context, tensors, moving, self._replace)
        if not self.into:
            return self._run, (context, tensors, moving, self._copy)
        function = self.function.bound(tensors) if isinstance(self.function, Binds) else self.function
        return self._run, (context, tensors, moving, partial(_write, function))

    def _run(
        self,
        context: Context,
        tensors: list[Any],
        moving: Sequence[tuple[int, TensorView]],
        compute: Callable[[Context, list[Any]], None],
    ) -> int:
        """tensors: None for those that move. Where weights fill the caches, little code matters."""
        if torch.is_grad_enabled():  # asking costs a tenth of what switching does
            with torch.no_grad():
                return self._run(context, tensors, moving, compute)
        if moving:
            tensors = [*tensors]
            for index, view in moving:
                tensors[index] = context.tensor(view)
        compute(context, tensors)
        return 0

    def _copy(self, context: Context, tensors: list[Any]) -> None:
        tensors[-1].copy_(self.function(*tensors[:-1]))

    def _replace(self, context: Context, tensors: list[Any]) -> None:
        if self.allocate is None:
            result = self.function(*tensors[:-1])
        else:
            result = self.allocate(tensors[0])
            self.function(*tensors[:-1], result)
        context.outputs[self.dst.slot.index] = result


class Call(Protocol):
    """What a program is made of."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def implementation(self) -> str: ...

    @property
    def flops(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype | None: ...

    @property
    def bytes_moved(self) -> int: ...

    @property
    def label(self) -> Label: ...

    def bind(self, context: Context) -> tuple[Callable[..., Any], tuple[Any, ...]]: ...
