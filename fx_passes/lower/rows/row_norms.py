"""Rows divided by their norms: RMSNorm and L2 normalization. Sums of squares and a layer normalization that is told
them, or PyTorch in passes.

sums   = (x * x) @ ones                                        eltwise and matmul, f32; or each row times itself
RMS    = (x - 0) / sqrt(sums + K * eps) * (sqrt(K) * weight)   layer_normalization, told mean 0 and these variances
L2     = (x - 0) / sqrt(max(sums, eps * eps))                  the maximum is a post-op of the product
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, fx

from fx_passes.candidates.candidates import (
    Argument,
    Arguments,
    Candidate,
    Operand,
    Operation,
    PrimitiveTemplate,
    Result,
    Temporary,
    TorchTemplate,
    Weights,
)
from fx_passes.candidates.layouts import row_major
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.context import LoweringContext, NotLowered
from fx_passes.lower.primitives import first_optimized
from fx_passes.lower.products.step import product
from fx_passes.lower.residuals import kept_dtype
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import (
    ARG_DST,
    ARG_MEAN,
    ARG_SCALE,
    ARG_SRC,
    ARG_VARIANCE,
    ARG_WEIGHTS,
    PostOps,
)
from zendnn_cffi.primitives.memory import MemoryDesc


def lower_rms_norm(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.rms_norm of [..., K] with a constant weight [K] or none."""
    arguments = context.values.arguments(node)
    src, spec = context.tensor(arguments["src"], "src"), context.values.specs[node]
    weight = arguments["weight"]
    weight = None if weight is None else context.constant(weight, "weight")
    dtype, eps = kept_dtype(node, context), arguments["eps"]
    eps = torch.finfo(torch.float32).eps if eps is None else float(eps)
    if spec.dtype != src.dtype:
        raise NotLowered("the weight promotes the result")
    size = src.shape[-1]
    # sums stand in for means: sqrt(K) of the weights makes up for it
    scale = torch.ones(size, dtype=torch.float32, device="cpu") if weight is None else weight.to(torch.float32)
    scale = scale * math.sqrt(size)
    scales = Weights(f"{node.args[1]} times sqrt({size})", scale, row_major((size,), torch.float32))
    in_primitives = _in_primitives(_rows(src, dtype), PostOps(), eps * size, scales)
    exactly = bool(arguments["rounds_last"]) and dtype != torch.float32
    in_passes = _rms_in_passes(size, eps, weight, torch.float32 if exactly else dtype)
    key = "rms_norm" if weight is None else f"rms_norm with weight{' in float32' * exactly}"
    candidates = _candidates(row_major(src.shape, dtype), in_primitives, in_passes, key)
    return Operation(node, node.name, "rms_norm", (arguments["src"],), spec, candidates)


def lower_l2_normalize(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.l2_normalize along the last dimension."""
    arguments = context.values.arguments(node)
    src, eps = context.tensor(arguments["src"], "src"), float(arguments["eps"])
    if arguments["dim"] not in (-1, src.ndim - 1):
        raise NotLowered("along another dimension than the last")
    if eps < 0 or 0 < eps * eps < torch.finfo(torch.float32).tiny:
        raise NotLowered(f"an eps of {eps}, whose square is no float32 number")
    dtype = context.dtype(src)
    at_least = PostOps().eltwise("clip", eps * eps, math.inf)
    in_primitives = _in_primitives(_rows(src, dtype), at_least, 0.0, None)
    key = f"l2_normalize eps={eps}"
    candidates = _candidates(row_major(src.shape, dtype), in_primitives, _l2_in_passes(eps), key)
    return Operation(node, node.name, "l2_normalize", (arguments["src"],), context.values.specs[node], candidates)


def _rows(src: TensorSpec, dtype: torch.dtype) -> MemoryDesc:
    """src seen as rows [M, K]."""
    return row_major((src.numel // src.shape[-1], src.shape[-1]), dtype)


def _candidates(
    desc: MemoryDesc, in_primitives: Iterator[tuple[PrimitiveTemplate, ...]], passes: Callable[..., None], text: str
) -> list[Candidate]:
    """Those in primitives, then PyTorch's passes; text tells these from others."""
    found = [Candidate(_names(calls), (desc,), desc, calls) for calls in in_primitives]
    key = f"{torch.__version__} {text}" if found else ""
    return [*found, Candidate("torch", (desc,), desc, (TorchTemplate(passes, "", True, key),))]


def _in_primitives(
    src: MemoryDesc, of_sums: PostOps, added: float, scales: Weights | None
) -> Iterator[tuple[PrimitiveTemplate, ...]]:
    """The primitives for rows [M, K]: every way to the sums of squares, then a normalization that is told them.

    of_sums  what else is done to the sums
    added    to the sums, under the root
    """
    rows, size = src.dims
    per_row = row_major((rows,), torch.float32)

    args: dict[int, Argument] = {
        ARG_SRC: Operand(0, src),
        ARG_MEAN: Weights(f"zero means of {rows}", torch.zeros(rows, dtype=torch.float32, device="cpu"), per_row),
        ARG_VARIANCE: Temporary(0, per_row),
        ARG_DST: Result(src),
    }
    if scales is not None:
        args[ARG_SCALE] = scales
    last = first_optimized(
        args,
        "layer_normalization",
        descriptors.layer_normalization,
        src,
        added,
        scale=scales is not None,
        shift=False,
        given_statistics=True,
    )
    if last is not None:
        for first in (_rows_with_themselves(src, of_sums), _squares_by_ones(src, of_sums)):
            if first:
                yield *first, last


def _rows_with_themselves(src: MemoryDesc, post_ops: PostOps) -> tuple[PrimitiveTemplate, ...]:
    """Each row [1, K] times itself [K, 1]: the fastest for a few rows. () without such a product."""
    rows, size = src.dims
    assert src.dtype is not None
    left, right = row_major((rows, 1, size), src.dtype), row_major((rows, size, 1), src.dtype)
    result = row_major((rows, 1, 1), torch.float32)
    args: Arguments = {
        ARG_SRC: Operand(0, left),
        ARG_WEIGHTS: Operand(0, right),
        ARG_DST: Temporary(0, result),
    }
    found = product(left, right, result, post_ops, args, 0)
    return () if found is None else (found,)


def _squares_by_ones(src: MemoryDesc, post_ops: PostOps) -> tuple[PrimitiveTemplate, ...]:
    """The squares, then their product with a column of ones: for many rows. () without optimized implementations."""
    rows, size = src.dims
    assert src.dtype is not None
    column, sums = row_major((size, 1), src.dtype), row_major((rows, 1), torch.float32)

    args: Arguments = {
        ARG_SRC: Temporary(1, src),
        ARG_WEIGHTS: Weights(f"column of {size} ones", torch.ones(size, 1, dtype=torch.float32, device="cpu"), column),
        ARG_DST: Temporary(0, sums),
    }
    of_square: Arguments = {ARG_SRC: Operand(0, src), ARG_DST: Temporary(1, src)}
    squares = first_optimized(of_square, "eltwise", descriptors.eltwise, "square", src, 0.0, 0.0)
    summed = product(src, column, sums, post_ops, args, 0, first="gemm:")
    return () if squares is None or summed is None else (squares, summed)


def _rms_in_passes(
    size: int, eps: float, weight: Tensor | None, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], None]:
    """Three passes of PyTorch over rows in cache, the last one into the arena.

    dtype  the rows are multiplied by the weight in; a longer one than the result's takes a tensor in between
    """
    weight = None if weight is None else weight.to(dtype)

    def normalize(x: Tensor, out: Tensor) -> None:
        norm = torch.linalg.vector_norm(x, 2, -1, keepdim=True, dtype=torch.float32)
        inverse = norm.mul_(norm).mul_(1.0 / size).add_(eps).rsqrt_()
        if weight is not None and weight.dtype != out.dtype:
            torch.mul(x * inverse, weight, out=out)
            return
        torch.mul(x, inverse, out=out)
        if weight is not None:
            out.mul_(weight)

    return normalize


def _l2_in_passes(eps: float) -> Callable[[Tensor, Tensor], None]:
    """Two passes of PyTorch, the last one into the arena."""

    def normalize(x: Tensor, out: Tensor) -> None:
        norm = torch.linalg.vector_norm(x, 2, -1, keepdim=True, dtype=torch.float32)
        torch.div(x, norm.clamp_min_(eps), out=out)

    return normalize


def _names(calls: tuple[PrimitiveTemplate, ...]) -> str:
    return " + ".join(dict.fromkeys(call.pd.implementation for call in calls))
