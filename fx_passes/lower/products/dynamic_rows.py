"""How rows (tokens) are quantized by scales that each call chooses.

choose_row_scales   reductions and arithmetic on a number for each row (scales.py)
dequantize_rows_by  a reorder, and binary primitives in place
quantize_rows_by    a binary primitive that multiplies each row, rounds and bounds; where there are zero points one
                    more, or a pass of PyTorch and a reorder, block by block
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.candidates import (
    Candidate,
    Operand,
    Operation,
    Result,
    Temporary,
)
from fx_passes.candidates.layouts import row_major
from fx_passes.graph.graph import is_call
from fx_passes.lower.context import LoweringContext, NotLowered
from fx_passes.lower.post_ops import dtype_of
from fx_passes.lower.primitives import keep_optimized
from fx_passes.lower.products.row_blocks import (
    INVERSE,
    MANY_ROWS,
    SCALE,
    ZERO_POINT,
    equal_blocks,
    have_zero_points,
    multiply_and_add,
    of_rows,
    torch_pass,
)
from fx_passes.lower.products.scales import (
    Calls,
    Primitives,
    Range,
    Step,
    choice,
    choose,
    first_implementation,
    rows_of,
)
from fx_passes.lower.quantized import RANGES
from zendnn_cffi.values import dataclass


def lower_choose_row_scales(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.choose_row_scales: reductions, and arithmetic on a number for each row."""
    src, spec = context.tensor(node.args[0], "src"), context.values.specs[node]
    kept = context.dtype(src)
    kind, low, high, eps = (context.values.concrete(argument) for argument in node.args[1:])
    how = Range(kind, low, high, eps, rounded=src.dtype)
    if src.ndim < 2 or (src.dtype != torch.float32 and how.how != "symmetric"):
        raise NotLowered(f"src {src} is no rows of float32, or of bf16 with symmetric scales")

    def append(calls: Primitives) -> None:
        choose(calls, how, rows_of(src.shape), kept, by_rows=True)

    return choice(node, context, row_major(src.shape, kept), row_major(spec.shape, torch.float32), append)


def lower_quantize_rows_by(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.quantize_rows_by to 8-bit integers."""
    src = context.tensor(node.args[0], "src")
    low, high, dtype = (context.values.concrete(argument) for argument in node.args[2:])
    if dtype not in RANGES or not RANGES[dtype][0] <= low < high <= RANGES[dtype][1]:
        raise NotLowered("it makes no 8-bit integers")
    is_whole = (low, high) == RANGES[dtype] or (_are_within(node.args[1]) and (low, high) == (-127, 127))
    have, want = row_major(src.shape, context.dtype(src)), row_major(src.shape, dtype)
    srcs = (have, row_major(context.values.specs[node.args[1]].shape, torch.float32))
    operation = Operation(node, node.name, "quantize", tuple(node.args[:2]), context.values.specs[node])
    rows = _Rows(rows_of(src.shape), dtype_of(have), dtype, None if is_whole else (low, high))
    found: list[tuple[str, Calls | None]] = [("", rows.symmetric())]
    if have_zero_points(node.args[1], context):
        found = [("", rows.by_primitives()), *rows.by_torch()]
    for name, calls in found:
        if calls is not None:
            operation.candidates.append(Candidate(f"{first_implementation(calls)}{name}", srcs, want, tuple(calls)))
    return keep_optimized(operation, "no optimized binary primitive quantizes it")


def lower_dequantize_rows_by(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.dequantize_rows_by to float32: a reorder, and what each row is multiplied by, in place."""
    src, spec = context.tensor(node.args[0], "src"), context.values.specs[node]
    if src.dtype not in RANGES or spec.dtype != torch.float32:
        raise NotLowered(f"{src.dtype} to {spec.dtype}")
    (m, k), dst = rows_of(src.shape), row_major(src.shape, torch.float32)
    kept, real = Operand(0, row_major((m, k), src.dtype)), Result(row_major((m, k), torch.float32))
    calls = Primitives("dequantize")
    calls.reorder(kept, real)
    if have_zero_points(node.args[1], context):
        calls.binary("sub", real, of_rows(ZERO_POINT, 0, m, m), real)
    calls.binary("mul", real, of_rows(SCALE, 0, m, m), real)
    operation = Operation(node, node.name, "dequantize", tuple(node.args[:2]), spec)
    if calls.templates is not None:
        chosen = row_major(context.values.specs[node.args[1]].shape, torch.float32)
        srcs = row_major(src.shape, src.dtype), chosen
        name = first_implementation(calls.templates)
        operation.candidates.append(Candidate(name, srcs, dst, tuple(calls.templates)))
    return keep_optimized(operation, "no optimized binary primitive dequantizes it")


@dataclass(frozen=True)
class _Rows:
    """Rows [M, K] to quantize.

    bounds  of the integers, where there are fewer than their dtype has
    """

    sizes: tuple[int, int]
    src: torch.dtype
    dst: torch.dtype
    bounds: tuple[int, int] | None

    @property
    def clip(self) -> list[Step]:
        return [] if self.bounds is None else [("clip", *map(float, self.bounds))]

    def block(self, first: int, count: int) -> tuple[Operand, Operand, Operand, Result]:
        """The rows, 1 / scales, zero points, and where integers are written."""
        m, k = self.sizes
        src, dst = row_major((count, k), self.src), row_major((count, k), self.dst)
        inverse, zero_point = (of_rows(which, first, count, m) for which in (INVERSE, ZERO_POINT))
        before = first * k
        return (
            Operand(0, src, before * self.src.itemsize),
            inverse,
            zero_point,
            Result(dst, before * self.dst.itemsize),
        )

    def symmetric(self) -> Calls | None:
        """A binary primitive that multiplies, rounds and bounds."""
        src, inverse, _, dst = self.block(0, self.sizes[0])
        calls = Primitives("binary")
        calls.binary("mul", src, inverse, dst, *self.clip)
        return calls.templates

    def by_primitives(self) -> Calls | None:
        """Two: the sum, as a post-op of the first, has a reference implementation alone."""
        src, inverse, zero_point, dst = self.block(0, self.sizes[0])
        real = Temporary(0, row_major(self.sizes, torch.float32))
        calls = Primitives("binary")
        calls.binary("mul", src, inverse, real)
        calls.binary("add", real, zero_point, dst, *self.clip)
        return calls.templates

    def by_torch(self) -> Iterator[tuple[str, Calls | None]]:
        """A pass of PyTorch, and a reorder, whose bounds are those of the dtype; of all rows, then of blocks."""
        m, k = self.sizes
        if self.src != torch.float32 or self.bounds is not None or m < MANY_ROWS:
            return
        for size in (m, *equal_blocks(m, k)):
            calls = Primitives("binary")
            for first in range(0, m, size):
                src, inverse, zero_point, dst = self.block(first, size)
                real = Temporary(0, row_major((size, k), torch.float32))
                calls.add(torch_pass(multiply_and_add, zero_point, src, inverse, real))
                calls.reorder(real, dst)
            yield " behind torch" + (f", in {m // size} blocks" if size < m else ""), calls.templates


def _are_within(chosen: fx.Node) -> bool:
    """Whether no row has a step beyond the largest, as far as anybody knows."""
    return is_call(chosen, ops.choose_row_scales) and chosen.args[1] == "largest"
