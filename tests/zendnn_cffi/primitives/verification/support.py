"""What these tests share: primitives by implementation, and stand-ins that answer wrongly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from zendnn_cffi import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, Attr, PostOps
from zendnn_cffi.primitives.descriptors import OpDesc
from zendnn_cffi.primitives.memory import Memory, MemoryDesc
from zendnn_cffi.primitives.primitive import Primitive, PrimitiveDesc
from zendnn_cffi.primitives.verification.unchecked import unchecked

F32 = torch.float32


def inner_product(m: int = 5, k: int = 16, n: int = 32) -> OpDesc:
    return descriptors.inner_product(MemoryDesc((m, k), F32), MemoryDesc((n, k), F32), None, MemoryDesc((m, n), F32))


def row_added(n: int = 32) -> Attr:
    return Attr(PostOps().binary("add", MemoryDesc((1, n), F32)))


def named(implementation: str, op: OpDesc, attr: Attr | None = None) -> PrimitiveDesc:
    """Return the implementation of this name, whatever is known of it."""
    with unchecked():
        return next(
            pd for pd in PrimitiveDesc(op, attr).implementations(everything=True) if pd.implementation == implementation
        )


def misbehave(
    monkeypatch: pytest.MonkeyPatch,
    implementation: str,
    spoil: Callable[[Mapping[int, Memory]], None],
    when: Callable[[PrimitiveDesc], bool] = lambda pd: True,
) -> None:
    """Let every primitive of this implementation spoil something after it ran."""
    execute = Primitive.execute

    def spoiled(self: Primitive, args: Mapping[int, Memory], stream: Any = None) -> None:
        execute(self, args, stream)
        if self.pd.implementation == implementation and when(self.pd):
            spoil(args)

    monkeypatch.setattr(Primitive, "execute", spoiled)


def bytes_of(memory: Memory) -> torch.Tensor:
    assert isinstance(memory.owner, torch.Tensor)
    return memory.owner


def one_number(args: Mapping[int, Memory]) -> None:
    bytes_of(args[ARG_DST]).view(F32)[-1] += 1


def an_operand(args: Mapping[int, Memory]) -> None:
    bytes_of(args[ARG_SRC]).view(F32)[0] += 1


def _beyond(args: Mapping[int, Memory], offset: int) -> None:
    inside = bytes_of(args[ARG_DST])
    whole = torch.empty(0, dtype=torch.uint8).set_(inside.untyped_storage())
    whole[inside.storage_offset() + (offset if offset < 0 else inside.numel())] = 0


def before(args: Mapping[int, Memory]) -> None:
    _beyond(args, -1)


def behind(args: Mapping[int, Memory]) -> None:
    _beyond(args, 0)
