"""Linear layers of values quantized by a scale that each call chooses, for the whole tensor.

choose_scale    reductions and arithmetic on one number (scales.py)
quantize_by     a reorder that is told scale and zero point in the call
dynamic_linear  post_ops((src @ weight.T + summand) * factors), inner_product on integers, which is told its factors
                    factors = scale * weight_scales
                    summand = bias / factors - zero_point * (sums of each row of the weight)
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fx_passes import ops
from fx_passes.candidates.candidates import (
    Argument,
    Candidate,
    Operand,
    Operation,
    PackedWeights,
    Result,
    Template,
    Temporary,
    Weights,
    primitive_template,
)
from fx_passes.candidates.layouts import RANGES, in_memory, row_major
from fx_passes.graph.graph import is_call
from fx_passes.lower.context import LoweringContext, NotLowered, constant_name, run_time_operands
from fx_passes.lower.post_ops import build_chain, dtype_of, fit_view
from fx_passes.lower.primitives import keep_optimized, optimized_implementations
from fx_passes.lower.products.scales import Primitives, Range, choice, choose, rows_of, zero_point_bits
from fx_passes.lower.quantized import used_bits
from fx_passes.ops.quantized import plain_axis
from zendnn_cffi.errors import ZenDNNError
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import (
    ARG_ATTR_OUTPUT_SCALES,
    ARG_ATTR_ZERO_POINTS,
    ARG_BIAS,
    ARG_DST,
    ARG_SRC,
    ARG_WEIGHTS,
    RUNTIME,
    Attr,
)
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc
from zendnn_cffi.values import dataclass

_INVERSE_BYTES, _ZERO_POINT_BYTES = 4, 12  # where in what choose_scale returns


def _choice_layout() -> MemoryDesc:
    """Of what choose_scale returns; made in calls, as the import of this file needs no library."""
    return row_major((4,), torch.float32)


def lower_choose_scale(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.choose_scale: reductions, and arithmetic on one number."""
    src = context.tensor(node.args[0], "src")
    low, high, eps, dtype, symmetric = (context.values.concrete(argument) for argument in node.args[1:])
    how = Range("symmetric" if symmetric else "asymmetric", low, high, eps, 128 if dtype == torch.uint8 else 0)
    shape, kept = src.shape or (1,), context.dtype(src)

    def append(calls: Primitives) -> None:
        choose(calls, how, rows_of(shape), kept, by_rows=False)
        zero_point_bits(calls)

    return choice(node, context, row_major(shape, kept), _choice_layout(), append)


def lower_quantize_by(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.quantize_by to all 8-bit integers: a reorder, or PyTorch."""
    src = context.tensor(node.args[0], "src")
    low, high, dtype = (context.values.concrete(argument) for argument in node.args[2:])
    if RANGES.get(dtype) != (low, high):
        raise NotLowered("it does not use all 8-bit integers")
    shape = src.shape or (1,)
    have, want = row_major(shape, context.dtype(src)), row_major(shape, dtype)
    count = row_major((src.numel,), context.dtype(src)), row_major((src.numel,), dtype)
    attr = Attr(output_scales=RUNTIME, zero_points={ARG_DST: 0})
    args: dict[int, Argument] = {
        ARG_SRC: Operand(0, count[0]),
        ARG_DST: Result(count[1]),
        ARG_ATTR_OUTPUT_SCALES: Operand(1, row_major((1,), torch.float32), _INVERSE_BYTES),
        ARG_ATTR_ZERO_POINTS | ARG_DST: Operand(1, row_major((1,), torch.int32), _ZERO_POINT_BYTES),
    }
    operation = Operation(node, node.name, "quantize", tuple(node.args[:2]), context.values.specs[node])
    try:
        pd = PrimitiveDesc.reorder(*count, attr)
    except ZenDNNError as refused:
        raise NotLowered("the library has no such reorder") from refused
    template = primitive_template(pd, args, "reorder")
    operation.candidates = [Candidate(pd.implementation, (have, _choice_layout()), want, (template,))]
    return keep_optimized(operation, "no optimized reorder quantizes it")


def lower_dynamic_linear(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.dynamic_linear with int8 weights that have a scale for each output, or one, and no zero points."""
    values, arguments = context.values, context.values.arguments(node)
    src = context.tensor(arguments["src"], "src")
    if src.ndim < 2:
        raise NotLowered("src is one row")
    base = values.base(node)
    dtype = context.dtype(base)
    weight, scales = integer_weight(node, context)
    n, k = weight.shape
    m = src.numel // k
    post_ops = context.post_ops(arguments["post_ops"], base, fit_view)
    operands = run_time_operands((arguments["src"], arguments["chosen"]), post_ops)
    dst = row_major(base.shape, dtype)
    chain = build_chain(post_ops, operands, dst, dtype, view=(m, n))
    operation = Operation(node, node.name, "inner_product", operands, values.specs[node], flops=2 * m * n * k)
    told = _tell(node, weight, scales, arguments["bias"])
    row = row_major((n,), torch.float32)
    rows, seen = row_major((m, k), src.dtype), row_major((m, n), dtype)
    attr = Attr(chain.post_ops, output_scales=RUNTIME, output_scales_mask=2)
    packed = PackedWeights(str(node.args[2].args[0]), weight)
    args: dict[int, Argument | PackedWeights] = {
        ARG_SRC: Operand(0, rows),
        ARG_WEIGHTS: packed,
        ARG_DST: Result(seen),
        ARG_ATTR_OUTPUT_SCALES: Temporary(0, row),
        **({ARG_BIAS: Temporary(0, row, row.size_bytes)} if told.has_summand else {}),
        **chain.args,
    }
    weights = MemoryDesc((n, k), torch.int8, "any")
    srcs = (row_major(src.shape, src.dtype), _choice_layout(), *map(in_memory, chain.srcs))
    bias, bits = row if told.has_summand else None, used_bits(weight, dtype_of(rows))
    found = optimized_implementations(
        descriptors.inner_product, rows, weights, bias, seen, weights_bits=bits, attr=attr
    )
    for pd in sorted(found, key=lambda pd: "gemm_" in pd.implementation):  # seldom the fastest: last among equals
        product = primitive_template(pd, args, "inner_product", operation.flops)
        operation.candidates.append(Candidate(pd.implementation, srcs, dst, (*told.calls, product)))
    otherwise = "no inner_product implementation takes these integers"
    return keep_optimized(operation, otherwise, post_ops=len(arguments["post_ops"]))


def integer_weight(node: fx.Node, context: LoweringContext) -> tuple[Tensor, Tensor]:
    """The weight's integers [N, K] and their scales [N], float64."""
    values, weight = context.values, node.args[2]
    if not is_call(weight, ops.dequantize) or weight not in values.constants:
        raise NotLowered("weight is not a constant of integers")
    kept, scale, zero_point, axis, _ = (values.concrete(argument) for argument in weight.args)
    is_int8 = isinstance(kept, Tensor) and kept.dtype == torch.int8 and kept.ndim == 2
    if not is_int8 or plain_axis(axis, tuple(kept.shape)) not in (None, 0):
        raise NotLowered("weight is not int8 with a scale for each output, or one")
    if zero_point is not None and bool(torch.as_tensor(zero_point).any()):
        raise NotLowered("weight has zero points")
    scales = torch.as_tensor(scale, dtype=torch.float64).reshape(-1).expand(kept.shape[0])
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise NotLowered("scales of the weight are not finite and positive")
    return kept.detach(), scales


@dataclass(frozen=True)
class _Told:
    """What each call tells a product: factors [1, N], then where there is a summand that [1, N], in temporary 0.

    calls  that compute them
    """

    calls: tuple[Template, ...]
    has_summand: bool


def _tell(node: fx.Node, weight: Tensor, scales: Tensor, bias: Tensor | None) -> _Told:
    """How factors = scale * scales, and summand = bias / scales / scale - zero_point * sums, are computed in a call."""
    if bias is not None and not isinstance(bias, Tensor):
        raise NotLowered("bias is not a constant")
    n, name, calls = len(scales), node.args[2].args[0], Primitives("factors")
    line = row_major((1, n), torch.float32)

    def constant(plain: Tensor, what: str) -> Weights:
        return Weights(f"{what} [1, {n}] of {name}", plain.float().reshape(1, n), line, is_streamed=False)

    one = row_major((1, 1), torch.float32)
    scale, inverse, zero_point = (Operand(1, one, which * one.size_bytes) for which in range(3))
    factors, summand = Temporary(0, line), Temporary(0, line, line.size_bytes)
    calls.binary("mul", constant(scales, "scales"), scale, factors)
    if bias is not None:
        steps = constant(bias.detach().double() / scales, f"{constant_name(node, 'bias')} in steps")
        calls.binary("mul", steps, inverse, summand)
    shifts = has_zero_point(node.args[1])
    if shifts:
        sums = constant(-weight.sum(1, dtype=torch.float64), "sums")
        calls.binary("mul", sums, zero_point, summand, *([("sum", 1.0)] if bias is not None else []))
    if calls.templates is None:
        raise NotLowered("the library has no primitives that tell it its scales")
    return _Told(tuple(calls.templates), bias is not None or shifts)


def has_zero_point(chosen: object) -> bool:
    """Whether what is chosen has one, as far as anybody knows."""
    return not is_call(chosen, ops.choose_scale) or not chosen.args[5] or chosen.args[4] != torch.int8
