"""Linear layers of 4-bit weights, which stay 4 bits: no candidate keeps a second copy.

few bf16 rows    PyTorch's kernel, which reads the weights as they are packed
otherwise        for some outputs at a time: PyTorch dequantizes their weights into a temporary, matmul reads it

PyTorch's kernel takes time by the row, and dequantizing by the weight. With float32 it has no vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, fx

from fx_passes.candidates.candidates import (
    Argument,
    Arguments,
    Candidate,
    Operand,
    Operation,
    Result,
    Template,
    Temporary,
    TorchTemplate,
    Weights,
    primitive_template,
)
from fx_passes.candidates.layouts import row_major, strided
from fx_passes.graph.int4_tensor import is_packed
from fx_passes.lower.context import LoweringContext, NotLowered, bias_weights, constant_name
from fx_passes.lower.primitives import optimized_implementations
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_BIAS, ARG_DST, ARG_SRC, ARG_WEIGHTS
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.runtime.packed_int4 import block_here, dequantized, packed_again
from zendnn_cffi.values import dataclass

NAME = "torch:int4pack"
_DEQUANTIZED_ROWS, _RATHER_DEQUANTIZED_ROWS = 32, 48  # offered from there on; first, where times are estimates
_WEIGHTS_AT_ONCE = 1 << 22  # that a temporary holds, about: in the cache that cores share
_LEAST_OUTPUTS = 256  # at once, multiples of it: whole blocks of every packing, and enough for a product
_DEQUANTIZE_OPS = 2  # of a weight: a product and a sum


def lower_int4_linear(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.int4_linear with constant weights: the kernel of PyTorch, and products with dequantized ones."""
    arguments, spec = context.values.arguments(node), context.values.specs[node]
    src = context.tensor(arguments["src"], "src")
    packed = context.constant(arguments["packed"], "the weight", (torch.uint8,))
    scales = context.constant(arguments["scales"], "scales")
    group, block = (context.values.concrete(arguments[name]) for name in ("group", "block"))
    if src.dtype != scales.dtype or src.ndim < 2 or not is_packed(packed, scales, group):
        raise NotLowered(f"src {src} with weights of {scales.dtype}, {group} inputs a group")
    layer = _Layer(node, src.numel // src.shape[-1], context.dtype(src), packed, scales, group, block)
    m, k, n = layer.sizes
    operation = Operation(node, node.name, "inner_product", (arguments["src"],), spec, flops=2 * m * k * n)
    bias = bias_weights(node, arguments["bias"], context)
    srcs, dst = (row_major(src.shape, layer.dtype),), row_major(spec.shape, layer.dtype)
    is_bf16 = torch.bfloat16 in (src.dtype, layer.dtype)  # that of the source is computed as float32 without kernels
    if not is_bf16 or m >= _DEQUANTIZED_ROWS:
        found = layer.by_primitives(bias)
        operation.candidates += [Candidate(name, srcs, dst, calls) for name, calls in found]
    if is_bf16:
        at = len(operation.candidates) if m >= _RATHER_DEQUANTIZED_ROWS else 0
        own = (row_major(src.shape, torch.bfloat16),), row_major(spec.shape, torch.bfloat16)
        operation.candidates.insert(at, Candidate(NAME, *own, (layer.by_torch(bias),)))
    if not operation.candidates:
        raise NotLowered("no matmul implementation takes these shapes")
    return operation


@dataclass(frozen=True)
class _Layer:
    """A linear layer on [M, K], as ops.int4_linear has it, that computes in dtype."""

    node: fx.Node
    m: int
    dtype: torch.dtype
    packed: Tensor
    scales: Tensor
    group: int
    block: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, K and N."""
        return self.m, 2 * self.packed.shape[1], self.packed.shape[0]

    def by_torch(self, bias: Weights | None) -> TorchTemplate:
        """One call of PyTorch's kernel on rows of bf16, of which the result is written with the bias, or copied."""
        m, k, n = self.sizes
        group, dtype = self.group, torch.bfloat16

        def compute(rows: Tensor, packed: Tensor, scales: Tensor, *others: Tensor) -> Tensor:
            found: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, group, scales)
            return torch.add(found, *others[:-1], out=others[-1]) if len(others) > 1 else others[-1].copy_(found)

        added = [] if bias is None else [Weights(bias.key, bias.plain, row_major((n,), dtype))]
        args: tuple[Argument, ...] = (
            Operand(0, row_major((m, k), dtype)),
            *self._weights_here(dtype),
            *added,
            Result(row_major((m, n), dtype)),
        )
        key = f"{torch.__version__} int4pack {group} {tuple(self.packed.shape)} {'with bias' if added else ''}"
        return TorchTemplate(compute, "", True, key, args, flops=2 * m * k * n)

    def by_primitives(self, bias: Weights | None) -> Iterator[tuple[str, tuple[Template, ...]]]:
        """For each implementation of matmul its name, and what computes the layer by it."""
        _, k, n = self.sizes
        some = max(1, _WEIGHTS_AT_ONCE // (k * _LEAST_OUTPUTS)) * _LEAST_OUTPUTS
        steps = [self._step(first, min(first + some, n), bias) for first in range(0, n, some)]
        for name in steps[0]:
            if all(name in step for step in steps):
                yield f"dequantized {name}", tuple(template for step in steps for template in step[name])

    def _step(self, first: int, last: int, bias: Weights | None) -> dict[str, tuple[Template, ...]]:
        """The outputs from first to last by each implementation that there is: weights, their product, and its place.

        Fast kernels write dense results alone.
        """
        (m, k, n), some = self.sizes, last - first
        src, weights = row_major((m, k), self.dtype), Temporary(0, row_major((k, some), self.dtype))
        dense = row_major((m, some), self.dtype)
        dst: Result | Temporary = Result(dense) if some == n else Temporary(1, dense)
        args: Arguments = {ARG_SRC: Operand(0, src), ARG_WEIGHTS: weights, ARG_DST: dst}
        across = None if bias is None else row_major((1, some), torch.float32)
        if bias is not None and across is not None:
            plain = bias.plain.detach()[first:last].reshape(1, some)
            args = {**args, ARG_BIAS: Weights(f"{bias.key} {first}", plain, across, is_streamed=False)}
        made = self._dequantize(first, last, weights)
        placed = [] if isinstance(dst, Result) else [self._place(first, dst)]
        found = optimized_implementations(descriptors.matmul, src, weights.desc, across, dense)
        flops = 2 * m * k * some
        return {pd.implementation: (made, primitive_template(pd, args, "matmul", flops), *placed) for pd in found}

    def _place(self, first: int, part: Temporary) -> TorchTemplate:
        """Some outputs into the result."""
        m, _, n = self.sizes
        seen = strided(part.desc.dims, self.dtype, (n, 1))
        args = (part, Result(seen, first * self.dtype.itemsize))
        key = f"{torch.__version__} columns {part.desc.dims} of {n} {self.dtype}"
        return TorchTemplate(_copy, "", True, key, args, assists=True)

    def _dequantize(self, first: int, last: int, out: Temporary) -> TorchTemplate:
        """The weights of some outputs, [K, outputs], where matmul reads them."""
        _, k, _ = self.sizes
        some = last - first
        key = f"{torch.__version__} dequantize 4 bits {self.group} {self.block} {out.desc.dims} {self.dtype}"
        compute = partial(_dequantize, self.group, self.block)
        args = (*self._weights(first, last, self.dtype), out)
        return TorchTemplate(compute, "", True, key, args, assists=True, flops=_DEQUANTIZE_OPS * k * some)

    def _weights_here(self, dtype: torch.dtype) -> tuple[Weights, Weights]:
        """All weights as the kernel of this process reads them, scales in dtype: a file may have another machine's."""
        packed, scales = self._weights(0, self.sizes[2], dtype)
        if self.block != block_here():
            late = partial(packed_again, packed.plain, self.block)
            packed = replace(packed, key=f"{packed.key} again", plain=packed.plain.to("meta"), late=late)
        return packed, scales

    def _weights(self, first: int, last: int, dtype: torch.dtype) -> tuple[Weights, Weights]:
        """The packed integers of some outputs, and their scales in dtype, both where they lie."""
        _, k, n = self.sizes
        name, factors = (constant_name(self.node, parameter) for parameter in ("packed", "scales"))
        suffix = "" if (first, last) == (0, n) else f" {first}"
        packed, scales = self.packed.detach()[first:last], self.scales.detach()[:, first:last]
        seen: MemoryDesc = row_major(tuple(scales.shape), dtype)
        if scales.dtype == dtype:  # else a copy is made
            seen = strided(tuple(scales.shape), dtype, tuple(scales.stride()))
        return (
            Weights(f"{name}{suffix}", packed, row_major((last - first, k // 2), torch.uint8)),
            Weights(f"{factors}{suffix}", scales, seen, is_streamed=False),
        )


def _dequantize(group: int, block: int, packed: Tensor, scales: Tensor, out: Tensor) -> None:
    dequantized(packed, scales, group, block, out)


def _copy(part: Tensor, out: Tensor) -> None:
    out.copy_(part)
