"""Reductions: a primitive over the last dimensions; sums and means over others as a product with ones.

sum(x, 1) of [B, L, C]  ->  ones [1, 1, L] @ x  ->  [B, 1, C]

Products, and windows of pooling, add up numbers one after another. PyTorch adds up sums of some, which keeps more
digits: it computes long sums of float32.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.candidates import Arguments, Candidate, Operand, Operation, Result, TorchTemplate, Weights
from fx_passes.candidates.layouts import layout, row_major, spatial_tags
from fx_passes.lower.context import LoweringContext, NotLowered
from fx_passes.lower.primitives import candidates, optimized_implementations
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_WEIGHTS, PostOps
from zendnn_cffi.primitives.memory import MemoryDesc

_LONGEST_SUM = 256  # numbers: relative errors are 5e-7 there, 2e-6 for 3,000, and PyTorch's 1e-7


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


def lower_norm(node: fx.Node, context: LoweringContext, src_node: fx.Node, dims: set[int]) -> Operation:
    """Lower Euclidean norms: PyTorch's kernel, which sums in float32, and over the last dimensions the primitive."""
    src, spec = context.values.specs[src_node], context.values.specs[node]
    if not dims or not src.numel:
        raise NotLowered("the norm of a number, or of nothing")
    dtype = context.dtype(src)
    operation = Operation(node, node.name, "reduction", (src_node,), spec)
    kept = row_major(tuple(1 if d in dims else n for d, n in enumerate(src.shape)), dtype)
    layouts = [row_major(src.shape, dtype), *(layout(src.shape, dtype, tag) for tag in spatial_tags(src.ndim)[:1])]
    left = row_major(spec.shape or (1,), dtype)
    for desc in layouts:
        norms = by_pytorch("norm", desc, tuple(sorted(dims)), kept)
        operation.candidates.append(Candidate("torch", (desc,), left, (norms,)))
    is_last = dims == set(range(min(dims), src.ndim)) and any(src.shape[d] > 1 for d in dims)
    if is_last and not loses_digits(math.prod(src.shape[d] for d in dims), dtype):
        operation.candidates += _primitives(src.shape, spec.shape, dtype, "norm_lp_sum", dims, p=2.0)
    return operation


def loses_digits(length: int, dtype: torch.dtype) -> bool:
    """Whether a sum of so many numbers, one after another, has fewer digits than eager's."""
    return dtype == torch.float32 and length > _LONGEST_SUM


def by_pytorch(kind: str, src: MemoryDesc, dims: tuple[int, ...], kept: MemoryDesc) -> TorchTemplate:
    """The sum, mean or norm over dims of operand 0, seen as src; the result is seen as kept, where dims are 1."""
    function = ops.REDUCTIONS[kind]

    def reduce(x: torch.Tensor, out: torch.Tensor) -> None:
        function(x, dims, True, out=out)

    key = f"{torch.__version__} {kind} over {dims} of {src.strides}"
    return TorchTemplate(reduce, "", True, key, (Operand(0, src), Result(kept)))


def _primitives(
    shape: tuple[int, ...], result: tuple[int, ...], dtype: torch.dtype, kind: str, dims: set[int], **options: float
) -> list[Candidate]:
    src = row_major(shape, dtype)
    kept = row_major(tuple(1 if d in dims else n for d, n in enumerate(shape)), dtype)
    args: Arguments = {ARG_SRC: Operand(0), ARG_DST: Result(kept)}
    found = optimized_implementations(descriptors.reduction, kind, src, kept, **options)
    return candidates(found, args, "reduction", (src,), row_major(result or (1,), dtype))


def _products(
    shape: tuple[int, ...], result: tuple[int, ...], dtype: torch.dtype, kind: str, dims: set[int]
) -> list[Candidate]:
    """Each column's sum is a row of ones times the matrix, or PyTorch's; a mean is divided before it is rounded."""
    before, rows, columns = shape[: min(dims)], [shape[d] for d in sorted(dims)], shape[max(dims) + 1 :]
    batch, length, width = map(math.prod, (before, rows, columns))
    src, dst = row_major((batch, length, width), dtype), row_major((batch, 1, width), dtype)
    srcs, left = (row_major(shape, dtype),), row_major(result or (1,), dtype)
    sums = Candidate("torch", srcs, left, (by_pytorch(kind, src, (1,), dst),))
    if loses_digits(length, dtype):
        return [sums]
    ones = row_major((1, 1, length), dtype)
    post_ops = PostOps().eltwise("linear", 1.0 / length) if kind == "mean" else PostOps()
    args: Arguments = {
        ARG_SRC: Weights(f"ones {length}", torch.ones(1, 1, length, dtype=torch.float32, device="cpu"), ones),
        ARG_WEIGHTS: Operand(0, src),
        ARG_DST: Result(dst),
    }
    found = optimized_implementations(descriptors.matmul, ones, src, None, dst, post_ops=post_ops)
    return [*candidates(found, args, "matmul", srcs, left, 2 * batch * length * width), sums]
