"""Root-mean-square normalization: sums of squares and a layer normalization that is told them, or PyTorch in passes.

sums   = (x * x) @ ones                                        eltwise and matmul, f32; or each row times itself
result = (x - 0) / sqrt(sums + K * eps) * (sqrt(K) * weight)   layer_normalization, told mean 0 and these variances
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, fx

from fx_passes.lower.candidates import (
    Argument,
    Candidate,
    Operand,
    Operation,
    PrimitiveTemplate,
    Result,
    Temporary,
    TorchTemplate,
    Weights,
    primitive_template,
)
from fx_passes.lower.context import LoweringContext, NotLowered, optimized_descs, usable_implementations
from fx_passes.lower.layouts import row_major
from fx_passes.lower.products import product
from zendnn_cffi import descriptors
from zendnn_cffi.attributes import (
    ARG_DST,
    ARG_MEAN,
    ARG_SCALE,
    ARG_SRC,
    ARG_VARIANCE,
    ARG_WEIGHTS,
    Attr,
    PostOps,
)
from zendnn_cffi.memory import MemoryDesc
from zendnn_cffi.primitive import PrimitiveDesc


def lower_rms_norm(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.rms_norm of [..., K] with a constant weight [K] or none."""
    arguments = context.values.arguments(node)
    src, spec = context.tensor(arguments["src"], "src"), context.values.specs[node]
    weight = arguments["weight"]
    weight = None if weight is None else context.constant(weight, "weight")
    dtype, eps = context.dtype(src), arguments["eps"]
    eps = torch.finfo(torch.float32).eps if eps is None else float(eps)
    if spec.dtype != src.dtype:
        raise NotLowered("the weight promotes the result")
    desc = row_major(src.shape, dtype)
    view = row_major((src.numel // src.shape[-1], src.shape[-1]), dtype)
    operation = Operation(node, node.name, "rms_norm", (arguments["src"],), spec)
    # sums stand in for means: sqrt(K) of the weights makes up for it
    scale = torch.ones(view.dims[1]) if weight is None else weight.to(torch.float32)
    scale = scale * math.sqrt(view.dims[1])
    scales = Weights(f"{node.args[1]} times sqrt({view.dims[1]})", scale, row_major(view.dims[1:], torch.float32))
    operation.candidates = [
        Candidate(_names(calls), (desc,), desc, calls) for calls in _in_primitives(view, eps, scales)
    ]
    key = f"{torch.__version__} rms_norm{'' if weight is None else ' with weight'}" if operation.candidates else ""
    passes = TorchTemplate(_in_passes(view.dims[1], eps, weight, dtype), "", True, key)
    operation.candidates.append(Candidate("torch", (desc,), desc, (passes,)))
    return operation


def _in_primitives(src: MemoryDesc, eps: float, scales: Weights) -> Iterator[tuple[PrimitiveTemplate, ...]]:
    """The primitives for rows [M, K]: every way to the sums of squares, then a normalization that is told them."""
    rows, size = src.dims
    per_row = row_major((rows,), torch.float32)

    def normalization() -> PrimitiveDesc:
        op = descriptors.layer_normalization(src, eps * size, scale=True, shift=False, given_statistics=True)
        return PrimitiveDesc(op, Attr())

    for pd in optimized_descs(usable_implementations(normalization))[:1]:
        args: dict[int, Argument] = {
            ARG_SRC: Operand(0, src),
            ARG_MEAN: Weights(f"zero means of {rows}", torch.zeros(rows), per_row),
            ARG_VARIANCE: Temporary(0, per_row),
            ARG_SCALE: scales,
            ARG_DST: Result(src),
        }
        last = primitive_template(pd, args, "layer_normalization")
        for first in (_rows_with_themselves(src), _squares_by_ones(src)):
            if first:
                yield *first, last


def _rows_with_themselves(src: MemoryDesc) -> tuple[PrimitiveTemplate, ...]:
    """Each row [1, K] times itself [K, 1]: the fastest for a few rows. () without such a product."""
    rows, size = src.dims
    assert src.dtype is not None
    left, right = row_major((rows, 1, size), src.dtype), row_major((rows, size, 1), src.dtype)
    result = row_major((rows, 1, 1), torch.float32)
    args: dict[int, Argument] = {
        ARG_SRC: Operand(0, left),
        ARG_WEIGHTS: Operand(0, right),
        ARG_DST: Temporary(0, result),
    }
    found = product(left, right, result, PostOps(), args, 0)
    return () if found is None else (found,)


def _squares_by_ones(src: MemoryDesc) -> tuple[PrimitiveTemplate, ...]:
    """The squares, then their product with a column of ones: for many rows. () without optimized implementations."""
    rows, size = src.dims
    assert src.dtype is not None
    column, sums = row_major((size, 1), src.dtype), row_major((rows, 1), torch.float32)

    def square() -> PrimitiveDesc:
        return PrimitiveDesc(descriptors.eltwise("square", src, 0.0, 0.0), Attr())

    args: dict[int, Argument] = {
        ARG_SRC: Temporary(1, src),
        ARG_WEIGHTS: Weights(f"column of {size} ones", torch.ones(size, 1), column),
        ARG_DST: Temporary(0, sums),
    }
    squares = optimized_descs(usable_implementations(square))
    summed = product(src, column, sums, PostOps(), args, 0, first="gemm:")
    if not squares or summed is None:
        return ()
    return primitive_template(squares[0], {ARG_SRC: Operand(0, src), ARG_DST: Temporary(1, src)}, "eltwise"), summed


def _in_passes(size: int, eps: float, weight: Tensor | None, dtype: torch.dtype) -> Callable[[Tensor, Tensor], None]:
    """Three passes of PyTorch over rows in cache, the last one into the arena."""
    weight = None if weight is None else weight.to(dtype)

    def normalize(x: Tensor, out: Tensor) -> None:
        norm = torch.linalg.vector_norm(x, 2, -1, keepdim=True, dtype=torch.float32)
        inverse = norm.mul_(norm).mul_(1.0 / size).add_(eps).rsqrt_()
        torch.mul(x, inverse, out=out)
        if weight is not None:
            out.mul_(weight)

    return normalize


def _names(calls: tuple[PrimitiveTemplate, ...]) -> str:
    return " + ".join(dict.fromkeys(call.pd.implementation for call in calls))
