"""Linear layers of values whose rows (tokens) are quantized by scales that each call chooses.

choose_row_scales  reductions and arithmetic on a number for each row (scales.py)
quantize_rows_by   a binary primitive that multiplies each row, rounds and bounds; one more where there are zero points
row_scaled_linear  inner_product on integers, then one binary primitive in place, and a reorder to bf16
                       sums = src @ weight.T                        exact, as float32
                       post_ops(sums * scale[m] * weight_scales[n] + bias[n])
                   with zero points the product is added to -zero_point[m] * (sums of each row of the weight)[n]
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fx_passes import ops
from fx_passes.candidates.candidates import (
    Argument,
    Arguments,
    Candidate,
    Operand,
    Operation,
    PackedWeights,
    PrimitiveTemplate,
    Result,
    Template,
    Temporary,
    TorchTemplate,
    Weights,
    primitive_template,
)
from fx_passes.candidates.layouts import Layout, in_memory, row_major
from fx_passes.graph.graph import is_call
from fx_passes.lower.context import LoweringContext, NotLowered, constant_name, run_time_operands
from fx_passes.lower.post_ops import Chain, build_chain, fit_view
from fx_passes.lower.primitives import first_optimized, keep_optimized, optimized_implementations
from fx_passes.lower.products.dynamic import integer_weight
from fx_passes.lower.products.scales import Primitives, Range, choice, choose, reordering, rows_of
from fx_passes.lower.quantized import RANGES
from fx_passes.ops.quantized import ASYMMETRIC
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_SRC_1, ARG_WEIGHTS, Attr, PostOps, arg_post_op
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.values import dataclass

_SCALE, _INVERSE, _ZERO_POINT = range(3)  # along dimension 0 of what choose_row_scales returns


def lower_choose_row_scales(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.choose_row_scales: reductions, and arithmetic on a number for each row."""
    src, spec = context.tensor(node.args[0], "src"), context.values.specs[node]
    kept = context.dtype(src)
    kind, low, high, eps = (context.values.concrete(argument) for argument in node.args[1:])
    how = Range(kind, low, high, eps, rounded=src.dtype)
    if src.ndim < 2 or (src.dtype != torch.float32 and how.how != "symmetric"):
        raise NotLowered(f"src {src} is no rows of float32, or of bf16 with symmetric scales")
    calls = Primitives()
    choose(calls, how, rows_of(src.shape), kept, by_rows=True)
    return choice(node, context, calls, row_major(src.shape, kept), row_major(spec.shape, torch.float32))


def lower_quantize_rows_by(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.quantize_rows_by to 8-bit integers: a binary primitive on [M, K], one more where there are zero points.

    A sum with a number of each row as a post-op of the first has a reference implementation alone.
    """
    src = context.tensor(node.args[0], "src")
    low, high, dtype = (context.values.concrete(argument) for argument in node.args[2:])
    how = _how(node.args[1])
    if dtype not in RANGES or not RANGES[dtype][0] <= low < high <= RANGES[dtype][1]:
        raise NotLowered("it makes no 8-bit integers")
    is_whole = (low, high) == RANGES[dtype] or (how == "largest" and (low, high) == (-127, 127))
    bounds = PostOps() if is_whole else PostOps().eltwise("clip", float(low), float(high))
    have, want = row_major(src.shape, context.dtype(src)), row_major(src.shape, dtype)
    rows = rows_of(src.shape)
    seen, kept, column = row_major(rows, have.dtype), row_major(rows, dtype), row_major((rows[0], 1), torch.float32)
    srcs = (have, row_major(context.values.specs[node.args[1]].shape, torch.float32))
    operation = Operation(node, node.name, "quantize", tuple(node.args[:2]), context.values.specs[node])
    inverse, zero_point, result = _of_rows(_INVERSE, column), _of_rows(_ZERO_POINT, column), Result(kept)
    if how in ASYMMETRIC:
        real = row_major(rows, torch.float32)
        between = Temporary(0, real)
        first = _binary("mul", Operand(0, seen), inverse, between)
        calls = [first, _binary("add", between, zero_point, result, bounds)]
    else:
        calls = [_binary("mul", Operand(0, seen), inverse, result, bounds)]
    found = [call for call in calls if call is not None]
    if len(found) == len(calls):
        operation.candidates.append(Candidate(found[0].pd.implementation, srcs, want, tuple(found)))
    return keep_optimized(operation, "no optimized binary primitive quantizes it")


def _binary(
    kind: str, a: Operand | Temporary, b: Operand, dst: Result | Temporary, post_ops: PostOps | None = None
) -> PrimitiveTemplate | None:
    """One binary primitive by the first optimized implementation; None where there is none."""
    args: dict[int, Argument] = {ARG_SRC: a, ARG_SRC_1: b, ARG_DST: dst}
    descs = a.desc, b.desc, dst.desc
    return first_optimized(args, "binary", descriptors.binary, kind, *descs, post_ops=post_ops or PostOps())


def _how(chosen: object) -> str:
    """How rows were chosen, as far as it counts: with zero points of their own where nobody knows."""
    return str(chosen.args[1]) if is_call(chosen, ops.choose_row_scales) else ASYMMETRIC[0]


def _of_rows(which: int, column: MemoryDesc) -> Operand:
    """One of the three numbers of each row, out of operand 1."""
    return Operand(1, column, which * column.size_bytes)


@dataclass(frozen=True)
class _Layer:
    """A linear layer of quantized rows: [M, K] with constant weights [N, K].

    scales, bias  of each output
    chain         its post-ops, behind the scales and the bias
    dtype         of the result; sums are in its memory where it is float32
    """

    node: fx.Node
    sizes: tuple[int, int, int]
    weight: Tensor
    scales: Weights
    bias: Weights | None
    chain: Chain
    has_zero_points: bool
    dtype: torch.dtype

    @property
    def sums(self) -> Result | Temporary:
        """Where the sums of products are."""
        m, _, n = self.sizes
        desc = row_major((m, n), torch.float32)
        return Result(desc) if self.dtype == torch.float32 else Temporary(0, desc)

    @property
    def column(self) -> MemoryDesc:
        return row_major((self.sizes[0], 1), torch.float32)

    def shift(self) -> TorchTemplate:
        """What zero points take away from the sums, written to where those are added."""
        n = self.sizes[2]
        plain = -self.weight.sum(1, dtype=torch.float64).float().reshape(1, n)
        name = f"sums of {self.node.args[2].args[0]}"
        sums = Weights(name, plain, row_major((1, n), torch.float32), is_streamed=False)
        args = (_of_rows(_ZERO_POINT, self.column), sums, self.sums)
        key = f"{torch.__version__} zero points of rows"
        return TorchTemplate(
            lambda zero_points, of, out: torch.mul(zero_points, of, out=out), "", True, key, args, True
        )

    def scale(self) -> list[Template]:
        """The sums as real numbers with bias and post-ops, in the result; empty where there is no fast kernel."""
        sums = self.sums
        args: dict[int, Argument] = {
            ARG_SRC: sums,
            ARG_SRC_1: _of_rows(_SCALE, self.column),
            ARG_DST: sums,
            **self.chain.args,
        }
        for position, weights in enumerate(filter(None, (self.scales, self.bias))):
            args[arg_post_op(position)] = weights
        descs = sums.desc, self.column, sums.desc
        found: list[Template | None] = [
            first_optimized(args, "binary", descriptors.binary, "mul", *descs, post_ops=self.chain.post_ops)
        ]
        if self.dtype != torch.float32:  # binary primitives of float32 write no other floats
            found.append(reordering(sums, Result(row_major((self.sizes[0], self.sizes[2]), self.dtype)), "reorder"))
        templates = [template for template in found if template is not None]
        return templates if len(templates) == len(found) else []


def lower_row_scaled_linear(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.row_scaled_linear with int8 weights that have a scale for each output, or one, and no zero points."""
    values, arguments = context.values, context.values.arguments(node)
    src, base = context.tensor(arguments["src"], "src"), values.base(node)
    if src.ndim < 2:
        raise NotLowered("src is one row")
    dtype, has_zero_points = base.dtype, _how(node.args[1]) in ASYMMETRIC
    if dtype != torch.float32 and (has_zero_points or dtype != torch.bfloat16):
        raise NotLowered(f"the result is {base}" + (", and rows have zero points" if has_zero_points else ""))
    weight, scales = integer_weight(node, context)
    post_ops = context.post_ops(arguments["post_ops"], base, fit_view)
    operands = run_time_operands((arguments["src"], arguments["chosen"]), post_ops)
    (m, k), n = rows_of(src.shape), weight.shape[0]
    dst, across = row_major(base.shape, dtype), row_major((1, n), torch.float32)
    bias = _bias(node, arguments["bias"], across)
    begin = PostOps().binary("mul", across)
    begin = begin if bias is None else begin.binary("add", across)
    chain = build_chain(post_ops, operands, dst, dtype, view=(m, n), begin=begin)
    key = f"scales of {node.args[2].args[0]} [1, N]"
    factors = Weights(key, scales.float().reshape(1, n), across, is_streamed=False)
    layer = _Layer(node, (m, k, n), weight, factors, bias, chain, has_zero_points, dtype)
    operation = Operation(node, node.name, "inner_product", operands, values.specs[node], flops=2 * m * n * k)
    chosen = row_major(values.specs[node.args[1]].shape, torch.float32)
    srcs = (row_major(src.shape, src.dtype), chosen, *map(in_memory, chain.srcs))
    _add_candidates(operation, layer, src.dtype, srcs, dst)
    return keep_optimized(operation, "the library has no such product", post_ops=len(arguments["post_ops"]))


def _bias(node: fx.Node, bias: object, across: MemoryDesc) -> Weights | None:
    if bias is None:
        return None
    if not isinstance(bias, Tensor):
        raise NotLowered("bias is not a constant")
    plain = bias.detach().float().reshape(across.dims)
    return Weights(f"{constant_name(node, 'bias')} [1, N]", plain, across, is_streamed=False)


def _add_candidates(
    operation: Operation, layer: _Layer, dtype: torch.dtype, srcs: tuple[Layout, ...], dst: MemoryDesc
) -> None:
    scale = layer.scale()
    if not scale:
        return
    m, k, n = layer.sizes
    src, weights = row_major((m, k), dtype), MemoryDesc((n, k), torch.int8, "any")
    args: Arguments = {
        ARG_SRC: Operand(0, src),
        ARG_WEIGHTS: PackedWeights(str(layer.node.args[2].args[0]), layer.weight),
        ARG_DST: layer.sums,
    }
    before: tuple[Template, ...] = (layer.shift(),) if layer.has_zero_points else ()
    attr = Attr(PostOps().sum() if layer.has_zero_points else PostOps())
    found = optimized_implementations(descriptors.inner_product, src, weights, None, layer.sums.desc, attr=attr)
    for pd in sorted(found, key=lambda pd: "gemm_" in pd.implementation):  # seldom the fastest: last among equals
        product = primitive_template(pd, args, "inner_product", operation.flops)
        operation.candidates.append(Candidate(pd.implementation, srcs, dst, (*before, product, *scale)))
