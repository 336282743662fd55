"""How rows (tokens) are quantized by scales that each call chooses.

choose_row_scales   reductions and arithmetic on a number for each row (scales.py)
dequantize_rows_by  a reorder, and binary primitives in place
quantize_rows_by    a binary primitive that multiplies each row, adds its zero point, rounds and bounds
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.candidates import (
    Candidate,
    Operand,
    Operation,
    Result,
)
from fx_passes.candidates.layouts import RANGES, row_major
from fx_passes.graph.graph import is_call
from fx_passes.lower.context import LoweringContext, NotLowered
from fx_passes.lower.post_ops import dtype_of
from fx_passes.lower.primitives import keep_optimized
from fx_passes.lower.products.row_blocks import (
    INVERSE,
    SCALE,
    ZERO_POINT,
    have_zero_points,
    of_rows,
)
from fx_passes.lower.products.scales import (
    Primitives,
    Range,
    Step,
    choice,
    choose,
    first_implementation,
    rows_of,
)
from zendnn_cffi.primitives.memory import MemoryDesc


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
    shifts, bounds = have_zero_points(node.args[1], context), None if is_whole else (low, high)
    calls = _quantize(rows_of(src.shape), have, want, shifts=shifts, bounds=bounds)
    if calls.templates is not None:
        templates = tuple(calls.templates)
        operation.candidates.append(Candidate(first_implementation(templates), srcs, want, templates))
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


def _quantize(
    rows: tuple[int, int], have: MemoryDesc, want: MemoryDesc, *, shifts: bool, bounds: tuple[int, int] | None
) -> Primitives:
    """Quantize [M, K] to integers within bounds, or within those of their dtype.

    Rows are channels here, [1, M, K]: a number for each channel is a post-op that is fast, one for each row is not.
    """
    m, k = rows
    src, dst = (row_major((1, m, k), dtype_of(desc)) for desc in (have, want))
    inverse, zero_point = (
        replace(of_rows(which, 0, m, m), desc=row_major((1, m, 1), torch.float32)) for which in (INVERSE, ZERO_POINT)
    )
    shift: list[Step] = [("add", zero_point)] if shifts else []
    clip: list[Step] = [] if bounds is None else [("clip", *map(float, bounds))]
    calls = Primitives("binary")
    calls.binary("mul", Operand(0, src), inverse, Result(dst), *shift, *clip)
    return calls


def _are_within(chosen: fx.Node) -> bool:
    """Whether no row has a step beyond the largest, as far as anybody knows."""
    return is_call(chosen, ops.choose_row_scales) and chosen.args[1] == "largest"
