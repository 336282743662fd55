"""Matrix products by AOCL-BLIS as calls of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zendnn_cffi.primitives.labels import Label, shaped
from zendnn_cffi.primitives.lpgemm import Gemm
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.runtime.context import Context
from zendnn_cffi.runtime.places import Slot
from zendnn_cffi.values import dataclass


@dataclass(frozen=True)
class GemmCall:
    """One product on weights that are packed in gemm.weights.

    src, dst  [M, K] and [M, N], rows dense
    operands  of post-ops, in their order
    """

    name: str
    gemm: Gemm
    src: Slot
    weights: Slot
    dst: Slot
    operands: tuple[tuple[Slot, MemoryDesc], ...] = ()
    flops: int = 0
    kind: str = "gemm"
    implementation: str = "aocl:lpgemm"

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the source."""
        return self.gemm.dtype

    @property
    def bytes_moved(self) -> int:
        """Bytes of operands, weights and result."""
        m, k, n = self.gemm.sizes
        elements = m * k * self.gemm.dtype.itemsize + m * n * self.gemm.result.itemsize
        return elements + self.gemm.weights.size_bytes + sum(desc.used_bytes for _, desc in self.operands)

    @property
    def label(self) -> Label:
        """What a trace shows."""
        m, k, n = self.gemm.sizes
        read = [shaped((m, k), self.gemm.dtype), shaped((k, n), self.gemm.dtype)]
        read += [shaped(desc.dims, desc.dtype or torch.uint8) for _, desc in self.operands]
        return Label(f"aocl::gemm {self.implementation}", tuple(read), self.name)

    def bind(self, context: Context) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The C function and its arguments in this context: of this run, where operands move between runs."""
        slots = (self.src, self.weights, self.dst, *(slot for slot, _ in self.operands))
        if any(slot.moves for slot in slots):
            return _Moving(self.gemm, context, slots), (context,)
        src, weights, dst, *operands = map(context.address, slots)
        post_ops, alive = self.gemm.bind_post_ops(operands)
        context.keep_alive += alive
        return self.gemm.function(), self.gemm.arguments(src, weights, dst, post_ops)


class _Moving:
    """A product in one context some of whose operands lie elsewhere in each run."""

    def __init__(self, gemm: Gemm, context: Context, slots: tuple[Slot, ...]) -> None:
        self._gemm, self._function = gemm, gemm.function()
        self._addresses = [0 if slot.moves else context.address(slot) for slot in slots]
        self._moving = [(number, slot) for number, slot in enumerate(slots) if slot.moves]
        self._operands: list[int] | None = None
        self._post_ops: tuple[Any, list[Any]] = None, []

    def __call__(self, context: Context) -> int:
        for number, slot in self._moving:
            self._addresses[number] = context.address(slot)
        src, weights, dst, *operands = self._addresses
        if operands != self._operands:  # they take longer to build than a small product takes
            self._post_ops, self._operands = self._gemm.bind_post_ops(operands), operands
        self._function(*self._gemm.arguments(src, weights, dst, self._post_ops[0]))
        return 0
