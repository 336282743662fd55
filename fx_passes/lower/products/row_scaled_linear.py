"""Linear layers of rows (tokens) that are quantized by scales which each call chooses: ops.row_scaled_linear.

inner_product on integers, then one binary primitive in place, and a reorder to bf16
    sums = src @ weight.T                        exact, as float32
    post_ops(sums * scale[m] * weight_scales[n] + bias[n])
with zero points the product is added to -zero_point[m] * (sums of each row of the weight)[n]
of one row, as in a step of generated text, the product's own post-ops do all of it
of many rows, weight_scales are no post-op: of 2048 rows of 1536 that takes twice as long as the pass it belongs to.
The product has them, or with zero points PyTorch, once these have cancelled. Nor is the bias where PyTorch's pass is
faster. Sums of blocks of rows are read from a cache. Where zero points' share of all rows fits a cache, binary
primitives alone are one more way: calls of PyTorch take longer than they compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

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
    Weights,
    primitive_template,
)
from fx_passes.candidates.layouts import in_memory, row_major
from fx_passes.lower.context import LoweringContext, NotLowered, constant_name, run_time_operands
from fx_passes.lower.pointwise.in_place import in_place
from fx_passes.lower.post_ops import BinaryPostOp, Chain, PostOp, build_chain, dtype_of, fit_view
from fx_passes.lower.primitives import first_optimized, keep_optimized, optimized_implementations
from fx_passes.lower.products.dynamic import integer_weight
from fx_passes.lower.products.row_blocks import (
    MANY_ROWS,
    SCALE,
    ZERO_POINT,
    equal_blocks,
    fit_a_cache,
    have_zero_points,
    multiply,
    multiply_and_add,
    of_rows,
    torch_pass,
)
from fx_passes.lower.products.scales import Step, first_implementation, reordering, rows_of, with_post_ops
from fx_passes.lower.quantized import used_bits
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import (
    ARG_ATTR_OUTPUT_SCALES,
    ARG_DST,
    ARG_SRC,
    ARG_SRC_1,
    ARG_WEIGHTS,
    RUNTIME,
    Attr,
    PostOps,
    arg_post_op,
)
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc
from zendnn_cffi.values import dataclass


@dataclass(frozen=True)
class _Layer:
    """A linear layer of quantized rows, or a block of them: [M, K] with constant weights [N, K].

    scales, bias     of each output
    post_ops         behind the scales and the bias
    operands         what the node reads in a run: integers, what was chosen, and what post-ops read
    has_zero_points  whether rows have them
    srcs, dst        layouts of the integers and of what was chosen; of the result: of all rows
    first, of        the first row of the block, and how many rows there are in all
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
    first: int
    of: int

    @property
    def rows(self) -> Operand:
        desc = row_major(self.sizes[:2], dtype_of(self.srcs[0]))
        return Operand(0, desc, self.before(desc))

    @property
    def result(self) -> Result:
        desc = row_major((self.sizes[0], self.sizes[2]), dtype_of(self.dst))
        return Result(desc, self.before(desc))

    def before(self, block: MemoryDesc) -> int:
        """Bytes of the rows before the block, which is described."""
        return self.first * block.size_bytes // self.sizes[0]

    @property
    def sums(self) -> Result | Temporary:
        """Where the sums of products are: in the memory of the result where that is float32."""
        desc = row_major((self.sizes[0], self.sizes[2]), torch.float32)
        return self.result if self.result.desc == desc else Temporary(0, desc)

    def of_rows(self, which: int) -> Operand:
        """One of the numbers that were chosen for each row."""
        return of_rows(which, self.first, self.sizes[0], self.of)

    @property
    def has_many_rows(self) -> bool:
        """Whether scales of the weight are no post-op: for each row these take as long as a pass over it."""
        return self.of >= MANY_ROWS

    def chain(self, *first: Argument, with_scales: bool) -> Chain:
        """Products with `first` and perhaps with the scales, the bias, and the post-ops."""
        across = row_major((1, self.sizes[2]), torch.float32)
        scales = replace(self.scales, key=f"{self.scales.key} [1, N]", plain=self.scales.plain[None], desc=across)
        steps: list[Step] = [("mul", factor) for factor in (*first, *((scales,) if with_scales else ()))]
        args, begin = with_post_ops({}, steps if self.bias is None else [*steps, ("add", self.bias)])
        chain = self.chain_of(self.post_ops, begin)
        return replace(chain, args={**args, **chain.args})

    def chain_of(self, post_ops: Sequence[PostOp], begin: PostOps | None = None) -> Chain:
        """Some of the post-ops, the last ones, on the block."""
        view, dtype = (self.sizes[0], self.sizes[2]), dtype_of(self.dst)
        first = 0 if begin is None else len(begin)
        chain = build_chain(post_ops, self.operands, self.dst, dtype, view=view, begin=begin)
        full = [isinstance(p, BinaryPostOp) and p.full for p in post_ops]
        whole = {arg_post_op(first + place, ARG_SRC_1) for place, is_full in enumerate(full) if is_full}
        args = {arg: self.moved(argument) if arg in whole else argument for arg, argument in chain.args.items()}
        return replace(chain, args=args)

    def moved(self, argument: Argument) -> Argument:
        """What a post-op reads of an operand that has all rows: the block's."""
        if not isinstance(argument, Operand) or argument.desc is None:
            return argument
        return replace(argument, offset_bytes=self.before(argument.desc))

    def at_once(self) -> Iterator[Candidate]:
        """A product whose post-ops do all the rest: only of one row, whose scale is a number."""
        if self.sizes[0] > 1 or self.has_zero_points:
            return
        chain = self.chain(self.of_rows(SCALE), with_scales=True)
        for pd in self.products(self.result, chain.post_ops):
            if not _is_gemm(pd):  # wrong with such post-ops
                yield self.candidate(chain, self.product(pd, self.result, chain.args))

    def in_steps(self) -> Iterator[Candidate]:
        """A product, and what makes real numbers of its sums; of all rows, then of blocks."""
        chain = self.chain(with_scales=False)
        folded = any(isinstance(p, BinaryPostOp) and p.full and p.constant is not None for p in self.post_ops)
        for size in (self.of, *(() if folded else equal_blocks(self.of, self.sizes[2]))):
            blocks = [self.block(first, size) for first in range(0, self.of, size)]
            post_ops = PostOps().sum() if self.has_zero_points else PostOps()
            found = sorted(blocks[0].products(blocks[0].sums, post_ops), key=_is_gemm)  # seldom the fastest: last
            for pd in found if len(blocks) == 1 else found[:1]:
                for ways in zip(*(block.ways() for block in blocks), strict=True):
                    calls: list[Template] = []
                    for block, (shift, scale) in zip(blocks, ways, strict=True):
                        calls += [*shift, block.product(pd, block.sums, {}), *scale]
                    yield self.candidate(chain, *calls, blocks=len(blocks))

    def block(self, first: int, size: int) -> _Layer:
        return replace(self, sizes=(size, *self.sizes[1:]), first=first)

    @property
    def product_scales(self) -> bool:
        """Whether the product multiplies by the scales of the weight: where no zero points have to cancel first."""
        return self.has_many_rows and not self.has_zero_points

    def products(self, dst: Result | Temporary, post_ops: PostOps) -> list[PrimitiveDesc]:
        """The implementations of the product."""
        weights = MemoryDesc(tuple(self.weight.shape), torch.int8, "any")
        is_scaled = self.product_scales
        attr = Attr(post_ops, output_scales=RUNTIME, output_scales_mask=2) if is_scaled else Attr(post_ops)
        rows, bits = self.rows.desc, used_bits(self.weight, dtype_of(self.srcs[0]))
        return optimized_implementations(
            descriptors.inner_product, rows, weights, None, dst.desc, weights_bits=bits, attr=attr
        )

    def product(self, pd: PrimitiveDesc, dst: Result | Temporary, args: Mapping[int, Argument]) -> PrimitiveTemplate:
        """The product by pd, with the arguments of its post-ops."""
        own: Arguments = {
            ARG_SRC: self.rows,
            ARG_WEIGHTS: PackedWeights(str(self.node.args[2].args[0]), self.weight),
            ARG_DST: dst,
            **({ARG_ATTR_OUTPUT_SCALES: self.scales} if self.product_scales else {}),
        }
        return primitive_template(pd, {**own, **args}, "inner_product", 2 * math.prod(self.sizes))

    def candidate(self, chain: Chain, *calls: Template, blocks: int = 1) -> Candidate:
        implementation = first_implementation(calls)
        implementation += f" in {blocks} blocks" if blocks > 1 else ""
        return Candidate(implementation, (*self.srcs, *map(in_memory, chain.srcs)), self.dst, calls)

    def ways(self) -> Iterator[tuple[list[Template], list[Template]]]:
        """What runs before the product, and behind it."""
        rounded = self.rounded()
        if rounded is None:
            return
        shift = self.shift_by_torch() if self.has_zero_points else []
        scaled = self.scale_by_primitives(rounded, with_scales=not self.has_many_rows)
        for scale in self.ways_to_scale(scaled, rounded):
            yield shift, scale
        if self.has_zero_points and fit_a_cache(self.of, self.sizes[2]):
            shifted = self.shift_by_primitive()
            if self.has_many_rows:
                scaled = self.scale_by_primitives(rounded, with_scales=True)
            if shifted and scaled:
                yield shifted, scaled

    def shift_by_torch(self) -> list[Template]:
        """What zero points take away from the sums, written to where those are added."""
        across = row_major((1, self.sizes[2]), torch.float32)
        return [torch_pass(multiply, self.of_rows(ZERO_POINT), self.taken_away(across), self.sums)]

    def shift_by_primitive(self) -> list[Template]:
        """The same by a primitive, which broadcasts no first operand: a row of sums for each row."""
        args: dict[int, Argument] = {
            ARG_SRC: self.taken_away(row_major((self.sizes[0], self.sizes[2]), torch.float32)),
            ARG_SRC_1: self.of_rows(ZERO_POINT),
            ARG_DST: self.sums,
        }
        descs = (args[ARG_SRC].desc, args[ARG_SRC_1].desc, self.sums.desc)
        found = first_optimized(args, "binary", descriptors.binary, "mul", *descs, post_ops=PostOps())
        return [] if found is None else [found]

    def taken_away(self, desc: MemoryDesc) -> Weights:
        """What a zero point of 1 takes away from each row of sums."""
        plain = -self.weight.sum(1, dtype=torch.float64).float().expand(desc.dims)
        key = f"sums of {self.node.args[2].args[0]}" + (f" x {desc.dims[0]}" if desc.dims[0] > 1 else "")
        return Weights(key, plain.contiguous(), desc, is_streamed=False)

    def ways_to_scale(self, scaled: list[Template], rounded: list[Template]) -> Iterator[list[Template]]:
        """What makes real numbers of the sums, with bias and post-ops, in the result: fast kernels, and PyTorch.

        scaled   what scale_by_primitives found, without the scales of the weight where there are many rows
        rounded  what rounded() found
        """
        sums = self.sums
        is_scaled = self.product_scales or not self.has_many_rows
        begin = [] if is_scaled else [torch_pass(multiply, sums, self.scales, sums)]
        if scaled:
            yield [*begin, *scaled]
        rest = self.rest() if self.has_many_rows else None
        if rest is None:
            return
        if self.bias is None:
            by_torch = torch_pass(multiply, sums, self.of_rows(SCALE), sums)
        else:
            by_torch = torch_pass(multiply_and_add, self.bias, sums, self.of_rows(SCALE), sums)
        yield [*begin, by_torch, *rest, *rounded]

    def scale_by_primitives(self, rounded: list[Template], *, with_scales: bool) -> list[Template]:
        """A binary primitive, and a reorder to bf16; empty where the library has none that is fast."""
        sums, scales = self.sums, self.of_rows(SCALE)
        chain = self.chain(with_scales=with_scales)
        args: dict[int, Argument] = {ARG_SRC: sums, ARG_SRC_1: scales, ARG_DST: sums, **chain.args}
        descs = sums.desc, scales.desc, sums.desc  # binary primitives of float32 write no other floats
        found = first_optimized(args, "binary", descriptors.binary, "mul", *descs, post_ops=chain.post_ops)
        return [] if found is None else [found, *rounded]

    def rounded(self) -> list[Template] | None:
        """What brings the sums to the dtype of the result; None where the library has no such reorder."""
        if self.sums == self.result:
            return []
        found = reordering(self.sums, self.result, "reorder")
        return None if found is None else [found]

    def rest(self) -> list[Template] | None:
        """The post-ops as a call of their own: none, or what begins with another matrix (a residual). None: others."""
        if not self.post_ops:
            return []
        first = self.post_ops[0]
        if not isinstance(first, BinaryPostOp) or not first.full or first.constant is not None:
            return None
        assert self.sums.desc is not None
        found = in_place(self.sums, self.sums.desc, self.post_ops, self.chain_of)
        return list(found) or None


def _is_gemm(pd: PrimitiveDesc) -> bool:
    return "gemm_" in pd.implementation


def lower_row_scaled_linear(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.row_scaled_linear with int8 weights that have a scale for each output, or one, and no zero points."""
    values, arguments = context.values, context.values.arguments(node)
    src, base = context.tensor(arguments["src"], "src"), values.base(node)
    if src.ndim < 2:
        raise NotLowered("src is one row")
    dtype, has_zero_points = base.dtype, have_zero_points(node.args[1], context)
    if dtype != torch.float32 and (has_zero_points or dtype != torch.bfloat16):
        raise NotLowered(f"the result is {base}" + (", and rows have zero points" if has_zero_points else ""))
    weight, scales = integer_weight(node, context)
    post_ops = context.post_ops(arguments["post_ops"], base, fit_view)
    operands = run_time_operands((arguments["src"], arguments["chosen"]), post_ops)
    (m, k), n = rows_of(src.shape), weight.shape[0]
    across = row_major((1, n), torch.float32)
    key = f"scales of {node.args[2].args[0]}"
    factors = Weights(key, scales.float(), row_major((n,), torch.float32), is_streamed=False)
    bias = _bias(node, arguments["bias"], across)
    srcs = row_major(src.shape, src.dtype), row_major(values.specs[node.args[1]].shape, torch.float32)
    dst = row_major(base.shape, dtype)
    layer = _Layer(node, (m, k, n), weight, factors, bias, post_ops, operands, has_zero_points, srcs, dst, 0, m)
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
