"""Reductions: a primitive over the last dimensions; sums and means over others as a product with ones.

sum(x, 1) of [B, L, C]  ->  ones [1, 1, L] @ x  ->  [B, 1, C]
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fx_passes.candidates.candidates import Arguments, Candidate, Operand, Operation, Result, Weights
from fx_passes.candidates.layouts import row_major
from fx_passes.lower.context import LoweringContext, NotLowered
from fx_passes.lower.primitives import candidates, optimized_implementations
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_WEIGHTS, PostOps


def lower_reduction(node: fx.Node, context: LoweringContext, src_node: fx.Node, kind: str, dims: set[int]) -> Operation:
    """Lower a reduction over neighbouring dimensions of row-major memory where it has an optimized implementation."""
    src, spec = context.values.specs[src_node], context.values.specs[node]
    neighbours = bool(dims) and dims == set(range(min(dims), max(dims) + 1))
    if not neighbours or src.dtype != spec.dtype:
        raise NotLowered(f"{kind} over dimensions {sorted(dims)} of {src} has only a reference implementation")
    if all(src.shape[d] == 1 for d in dims):
        raise NotLowered(f"{kind} over dimensions of size 1")
    operation = Operation(node, node.name, "reduction", (src_node,), spec)
    if max(dims) == src.ndim - 1:
        operation.candidates = _primitives(src.shape, spec.shape, context.dtype(src), kind, dims)
    elif kind in ("sum", "mean"):
        operation.candidates = _products(src.shape, spec.shape, context.dtype(src), kind, dims)
    if not operation.candidates:
        raise NotLowered(f"{kind} over dimensions {sorted(dims)} of {src} has only a reference implementation")
    return operation


def _primitives(
    shape: tuple[int, ...], result: tuple[int, ...], dtype: torch.dtype, kind: str, dims: set[int]
) -> list[Candidate]:
    src = row_major(shape, dtype)
    kept = row_major(tuple(1 if d in dims else n for d, n in enumerate(shape)), dtype)
    args: Arguments = {ARG_SRC: Operand(0), ARG_DST: Result(kept)}
    found = optimized_implementations(descriptors.reduction, kind, src, kept)
    return candidates(found, args, "reduction", (src,), row_major(result or (1,), dtype))


def _products(
    shape: tuple[int, ...], result: tuple[int, ...], dtype: torch.dtype, kind: str, dims: set[int]
) -> list[Candidate]:
    """Each column's sum is a row of ones times the matrix; a mean is divided before it is rounded."""
    before, rows, columns = shape[: min(dims)], [shape[d] for d in sorted(dims)], shape[max(dims) + 1 :]
    batch, length, width = map(math.prod, (before, rows, columns))
    ones, src = row_major((1, 1, length), dtype), row_major((batch, length, width), dtype)
    dst = row_major((batch, 1, width), dtype)
    post_ops = PostOps().eltwise("linear", 1.0 / length) if kind == "mean" else PostOps()
    args: Arguments = {
        ARG_SRC: Weights(f"ones {length}", torch.ones(1, 1, length, dtype=torch.float32, device="cpu"), ones),
        ARG_WEIGHTS: Operand(0, src),
        ARG_DST: Result(dst),
    }
    found = optimized_implementations(descriptors.matmul, ones, src, None, dst, post_ops=post_ops)
    srcs, flops = (row_major(shape, dtype),), 2 * batch * length * width
    return candidates(found, args, "matmul", srcs, row_major(result or (1,), dtype), flops)
