"""Linear layers of values whose rows (tokens) are quantized by scales that each call chooses.

choose_row_scales  reductions and arithmetic on a number for each row (scales.py)
quantize_rows_by   a binary primitive that multiplies each row, rounds and bounds; one more where there are zero points
row_scaled_linear  inner_product on integers, then one binary primitive in place, and a reorder to bf16
                       sums = src @ weight.T                        exact, as float32
                       post_ops(sums * scale[m] * weight_scales[n] + bias[n])
                   with zero points the product is added to -zero_point[m] * (sums of each row of the weight)[n]
                   of one row, as in a step of generated text, the product's own post-ops do all of it
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

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
from fx_passes.candidates.layouts import in_memory, row_major
from fx_passes.graph.graph import is_call
from fx_passes.lower.context import LoweringContext, NotLowered, constant_name, run_time_operands
from fx_passes.lower.post_ops import Chain, PostOp, build_chain, dtype_of, fit_view
from fx_passes.lower.primitives import first_optimized, keep_optimized, optimized_implementations
from fx_passes.lower.products.dynamic import integer_weight
from fx_passes.lower.products.scales import Primitives, Range, Step, choice, choose, reordering, rows_of, with_post_ops
from fx_passes.lower.quantized import RANGES
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_SRC_1, ARG_WEIGHTS, Attr, PostOps
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc
from zendnn_cffi.values import dataclass

_SCALE, _INVERSE, _ZERO_POINT = range(3)  # along dimension 0 of what choose_row_scales returns: 2, or 3 numbers


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
    """Lower ops.quantize_rows_by to 8-bit integers: a binary primitive on [M, K], one more where there are zero points.

    A sum with a number of each row as a post-op of the first has a reference implementation alone.
    """
    src = context.tensor(node.args[0], "src")
    low, high, dtype = (context.values.concrete(argument) for argument in node.args[2:])
    if dtype not in RANGES or not RANGES[dtype][0] <= low < high <= RANGES[dtype][1]:
        raise NotLowered("it makes no 8-bit integers")
    is_whole = (low, high) == RANGES[dtype] or (_are_within(node.args[1]) and (low, high) == (-127, 127))
    bounds = PostOps() if is_whole else PostOps().eltwise("clip", float(low), float(high))
    have, want = row_major(src.shape, context.dtype(src)), row_major(src.shape, dtype)
    rows = rows_of(src.shape)
    seen, kept, column = row_major(rows, have.dtype), row_major(rows, dtype), row_major((rows[0], 1), torch.float32)
    srcs = (have, row_major(context.values.specs[node.args[1]].shape, torch.float32))
    operation = Operation(node, node.name, "quantize", tuple(node.args[:2]), context.values.specs[node])
    inverse, zero_point, result = _of_rows(_INVERSE, column), _of_rows(_ZERO_POINT, column), Result(kept)
    if _have_zero_points(node.args[1], context):
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


def _have_zero_points(chosen: fx.Node, context: LoweringContext) -> bool:
    return context.values.specs[chosen].shape[0] > _ZERO_POINT


def _are_within(chosen: fx.Node) -> bool:
    """Whether no row has a step beyond the largest, as far as anybody knows."""
    return is_call(chosen, ops.choose_row_scales) and chosen.args[1] == "largest"


def _of_rows(which: int, column: MemoryDesc) -> Operand:
    """One of the three numbers of each row, out of operand 1."""
    return Operand(1, column, which * column.size_bytes)


@dataclass(frozen=True)
class _Layer:
    """A linear layer of quantized rows: [M, K] with constant weights [N, K].

    scales, bias     of each output
    post_ops         behind the scales and the bias
    operands         what the node reads in a run: integers, what was chosen, and what post-ops read
    has_zero_points  whether rows have them
    srcs, dst        layouts of the integers and of what was chosen; of the result
    """

    node: fx.Node
    sizes: tuple[int, int, int]
    weight: Tensor
    scales: Weights
    bias: Weights | None
    post_ops: Sequence[PostOp]
    operands: Sequence[fx.Node]
    has_zero_points: bool
    srcs: tuple[MemoryDesc, MemoryDesc]
    dst: MemoryDesc

    @property
    def rows(self) -> MemoryDesc:
        return row_major((self.sizes[0], self.sizes[1]), dtype_of(self.srcs[0]))

    @property
    def result(self) -> Result:
        return Result(row_major((self.sizes[0], self.sizes[2]), dtype_of(self.dst)))

    @property
    def sums(self) -> Result | Temporary:
        """Where the sums of products are: in the memory of the result where that is float32."""
        desc = row_major((self.sizes[0], self.sizes[2]), torch.float32)
        return self.result if self.result.desc == desc else Temporary(0, desc)

    def of_rows(self, which: int) -> Operand:
        """One of the numbers that were chosen for each row."""
        return _of_rows(which, row_major((self.sizes[0], 1), torch.float32))

    def chain(self, *first: Argument) -> Chain:
        """Products with `first` and with the scales, the bias, and the post-ops."""
        steps: list[Step] = [("mul", factor) for factor in (*first, self.scales)]
        args, begin = with_post_ops({}, steps if self.bias is None else [*steps, ("add", self.bias)])
        view, dtype = (self.sizes[0], self.sizes[2]), dtype_of(self.dst)
        chain = build_chain(self.post_ops, self.operands, self.dst, dtype, view=view, begin=begin)
        return replace(chain, args={**args, **chain.args})

    def at_once(self) -> Iterator[Candidate]:
        """A product whose post-ops do all the rest: only of one row, whose scale is a number."""
        if self.sizes[0] > 1 or self.has_zero_points:
            return
        chain = self.chain(self.of_rows(_SCALE))
        for pd in self.products(self.result, chain.post_ops):
            if not _is_gemm(pd):  # wrong with such post-ops
                yield self.candidate(chain, self.product(pd, self.result, chain.args))

    def in_steps(self) -> Iterator[Candidate]:
        """A product, and what makes real numbers of its sums."""
        chain = self.chain()
        scale = self.scale(chain)
        before = [self.shift()] if self.has_zero_points else []
        post_ops = PostOps().sum() if self.has_zero_points else PostOps()
        for pd in sorted(self.products(self.sums, post_ops) if scale else (), key=_is_gemm):
            yield self.candidate(chain, *before, self.product(pd, self.sums, {}), *scale)

    def products(self, dst: Result | Temporary, post_ops: PostOps) -> list[PrimitiveDesc]:
        """The implementations of the product."""
        weights = MemoryDesc(tuple(self.weight.shape), torch.int8, "any")
        attr = Attr(post_ops)
        return optimized_implementations(descriptors.inner_product, self.rows, weights, None, dst.desc, attr=attr)

    def product(self, pd: PrimitiveDesc, dst: Result | Temporary, args: Mapping[int, Argument]) -> PrimitiveTemplate:
        """The product by pd, with the arguments of its post-ops."""
        weights = PackedWeights(str(self.node.args[2].args[0]), self.weight)
        own: Arguments = {ARG_SRC: Operand(0, self.rows), ARG_WEIGHTS: weights, ARG_DST: dst}
        return primitive_template(pd, {**own, **args}, "inner_product", 2 * math.prod(self.sizes))

    def candidate(self, chain: Chain, *calls: Template) -> Candidate:
        implementation = next(call.pd.implementation for call in calls if isinstance(call, PrimitiveTemplate))
        return Candidate(implementation, (*self.srcs, *map(in_memory, chain.srcs)), self.dst, calls)

    def shift(self) -> TorchTemplate:
        """What zero points take away from the sums, written to where those are added."""
        n = self.sizes[2]
        plain = -self.weight.sum(1, dtype=torch.float64).float().reshape(1, n)
        name = f"sums of {self.node.args[2].args[0]}"
        sums = Weights(name, plain, row_major((1, n), torch.float32), is_streamed=False)
        args = (self.of_rows(_ZERO_POINT), sums, self.sums)
        key = f"{torch.__version__} zero points of rows"
        return TorchTemplate(
            lambda zero_points, of, out: torch.mul(zero_points, of, out=out), "", True, key, args, True
        )

    def scale(self, chain: Chain) -> list[PrimitiveTemplate]:
        """The sums as real numbers with bias and post-ops, in the result; empty where there is no fast kernel."""
        sums, scales = self.sums, self.of_rows(_SCALE)
        args: dict[int, Argument] = {ARG_SRC: sums, ARG_SRC_1: scales, ARG_DST: sums, **chain.args}
        descs = sums.desc, scales.desc, sums.desc
        found: list[PrimitiveTemplate | None] = [
            first_optimized(args, "binary", descriptors.binary, "mul", *descs, post_ops=chain.post_ops)
        ]
        if sums != self.result:  # binary primitives of float32 write no other floats
            found.append(reordering(sums, self.result, "reorder"))
        templates = [template for template in found if template is not None]
        return templates if len(templates) == len(found) else []


def _is_gemm(pd: PrimitiveDesc) -> bool:
    return "gemm_" in pd.implementation


def lower_row_scaled_linear(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.row_scaled_linear with int8 weights that have a scale for each output, or one, and no zero points."""
    values, arguments = context.values, context.values.arguments(node)
    src, base = context.tensor(arguments["src"], "src"), values.base(node)
    if src.ndim < 2:
        raise NotLowered("src is one row")
    dtype, has_zero_points = base.dtype, _have_zero_points(node.args[1], context)
    if dtype != torch.float32 and (has_zero_points or dtype != torch.bfloat16):
        raise NotLowered(f"the result is {base}" + (", and rows have zero points" if has_zero_points else ""))
    weight, scales = integer_weight(node, context)
    post_ops = context.post_ops(arguments["post_ops"], base, fit_view)
    operands = run_time_operands((arguments["src"], arguments["chosen"]), post_ops)
    (m, k), n = rows_of(src.shape), weight.shape[0]
    across = row_major((1, n), torch.float32)
    key = f"scales of {node.args[2].args[0]} [1, N]"
    factors = Weights(key, scales.float().reshape(1, n), across, is_streamed=False)
    bias = _bias(node, arguments["bias"], across)
    srcs = row_major(src.shape, src.dtype), row_major(values.specs[node.args[1]].shape, torch.float32)
    dst = row_major(base.shape, dtype)
    layer = _Layer(node, (m, k, n), weight, factors, bias, post_ops, operands, has_zero_points, srcs, dst)
    candidates = [*layer.at_once()] or [*layer.in_steps()]
    operation = Operation(node, node.name, "inner_product", operands, values.specs[node], candidates, 2 * m * n * k)
    return keep_optimized(operation, "the library has no such product", post_ops=len(arguments["post_ops"]))


def _bias(node: fx.Node, bias: object, across: MemoryDesc) -> Weights | None:
    if bias is None:
        return None
    if not isinstance(bias, Tensor):
        raise NotLowered("bias is not a constant")
    plain = bias.detach().float().reshape(across.dims)
    return Weights(f"{constant_name(node, 'bias')} [1, N]", plain, across, is_streamed=False)
