"""Matrix products by AOCL-BLIS as calls of a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zendnn_cffi.primitives.labels import Label, shaped
from zendnn_cffi.primitives.lpgemm import Gemm
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.runtime.context import Context
from zendnn_cffi.runtime.places import Slot


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
            return self._run, (context, slots)
        function, arguments, alive = self._bound(context, slots)
        context.keep_alive += alive
        return function, arguments

    def _run(self, context: Context, slots: tuple[Slot, ...]) -> int:
        function, arguments, alive = self._bound(context, slots)
        function(*arguments)
        del alive
        return 0

    def _bound(
        self, context: Context, slots: tuple[Slot, ...]
    ) -> tuple[Callable[..., None], tuple[Any, ...], list[Any]]:
        src, weights, dst, *operands = map(context.address, slots)
        return self.gemm.bind(src, weights, dst, operands)
