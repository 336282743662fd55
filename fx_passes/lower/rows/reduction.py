"""Reductions: a primitive over the last dimensions; sums and means over others as a product with ones.

sum(x, 1) of [B, L, C]  ->  ones [1, 1, L] @ x  ->  [B, 1, C]
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fx_passes.candidates.candidates import Argument, Candidate, Operand, Operation, Result, Weights, primitive_template
from fx_passes.candidates.layouts import row_major
from fx_passes.lower.context import LoweringContext, NotLowered, optimized_descs, usable_implementations
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_WEIGHTS, Attr, PostOps
from zendnn_cffi.primitives.primitive import PrimitiveDesc


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

    def create() -> PrimitiveDesc:
        return PrimitiveDesc(descriptors.reduction(kind, src, kept), Attr())

    args: dict[int, Argument] = {ARG_SRC: Operand(0), ARG_DST: Result(kept)}
    dst = row_major(result or (1,), dtype)
    return [
        Candidate(pd.implementation, (src,), dst, (primitive_template(pd, args, "reduction"),))
        for pd in optimized_descs(usable_implementations(create))
    ]


def _products(
    shape: tuple[int, ...], result: tuple[int, ...], dtype: torch.dtype, kind: str, dims: set[int]
) -> list[Candidate]:
    """Each column's sum is a row of ones times the matrix; a mean is divided before it is rounded."""
    before, rows, columns = shape[: min(dims)], [shape[d] for d in sorted(dims)], shape[max(dims) + 1 :]
    batch, length, width = map(math.prod, (before, rows, columns))
    ones, src = row_major((1, 1, length), dtype), row_major((batch, length, width), dtype)
    dst = row_major((batch, 1, width), dtype)
    post_ops = PostOps().eltwise("linear", 1.0 / length) if kind == "mean" else PostOps()

    def create() -> PrimitiveDesc:
        return PrimitiveDesc(descriptors.matmul(ones, src, None, dst), Attr(post_ops))

    args: dict[int, Argument] = {
        ARG_SRC: Weights(f"ones {length}", torch.ones(1, 1, length, dtype=torch.float32, device="cpu"), ones),
        ARG_WEIGHTS: Operand(0, src),
        ARG_DST: Result(dst),
    }
    return [
        Candidate(
            pd.implementation,
            (row_major(shape, dtype),),
            row_major(result or (1,), dtype),
            (primitive_template(pd, args, "matmul", 2 * batch * length * width),),
        )
        for pd in optimized_descs(usable_implementations(create))
    ]
