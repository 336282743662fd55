"""Linear layers (inner_product) and matrix products (matmul) with their post-ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fx_passes.candidates.candidates import (
    Arguments,
    Candidate,
    Operand,
    Operation,
    PackedWeights,
    PrimitiveTemplate,
    Result,
    Weights,
    primitive_template,
)
from fx_passes.candidates.layouts import Numerics, Quantized, in_memory, row_major, strided
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.context import (
    LoweringContext,
    NotLowered,
    bias_weights,
    constant_name,
    residual_to_overwrite,
    run_time_operands,
)
from fx_passes.lower.post_ops import Chain, PostOp, build_chain, fit_view
from fx_passes.lower.primitives import (
    candidates,
    implementations,
    keep_optimized,
    optimized_implementations,
    weighted_arguments,
)
from fx_passes.lower.products.lpgemm import lpgemm_candidates
from fx_passes.lower.products.matrix_vector import matrix_vector_candidates
from fx_passes.lower.quantized import Factors, factors_of, numerics_of, told, wanted_of
from fx_passes.lower.residuals import kept_dtype
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_WEIGHTS
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.values import dataclass


def lower_linear(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.linear with a constant weight: matmul or inner_product on [M, K], leading dimensions made one."""
    arguments = context.values.arguments(node)
    src = context.tensor(arguments["src"], "src")
    weight = context.constant(arguments["weight"], "weight")
    bias = bias_weights(node, arguments["bias"], context)
    if src.dtype != weight.dtype or src.ndim < 2 or weight.ndim != 2:
        raise NotLowered(f"src {src} with weight {list(weight.shape)} of {weight.dtype}")
    dtype, base = context.dtype(src), context.values.base(node)
    post_ops = context.post_ops(arguments["post_ops"], base, fit_view)
    operands = run_time_operands((arguments["src"],), post_ops)
    n, k = weight.shape
    if bias is not None and bias.plain.shape != (n,):
        raise NotLowered(f"bias has {bias.plain.numel()} numbers for {n} outputs")
    m = src.numel // k
    operation = Operation(node, node.name, "inner_product", operands, context.values.specs[node], flops=2 * m * n * k)
    kept = kept_dtype(node, context)
    dst = row_major(base.shape, kept)
    chain = build_chain(
        post_ops,
        operands,
        dst,
        kept,
        sum_node=residual_to_overwrite(node, arguments["src"], post_ops, context),
        view=(m, n),
    )
    name = constant_name(node, "weight")
    product = Product((m, k, n), dtype, weight, name, bias, chain, kept)
    srcs = (row_major(src.shape, dtype), *map(in_memory, chain.srcs))
    operation.candidates = [
        Candidate(template.pd.implementation, srcs, dst, (template,), overwrites=chain.overwrites)
        for template in product.templates()
    ]
    if dtype != base.dtype and not post_ops and all(user.op == "output" for user in node.users):
        wide = row_major(base.shape, base.dtype)  # as it leaves: not rounded, and not written twice
        operation.candidates += [
            Candidate(template.pd.implementation, srcs, wide, (template,))
            for template in replace(product, result=base.dtype).templates()
        ]
    otherwise = "no matmul or inner_product implementation takes these shapes"
    keep_optimized(operation, otherwise, post_ops=len(arguments["post_ops"]), or_reference=True)
    own = Weights(name, weight, row_major((n, k), dtype))
    if m == 1 and dtype == base.dtype == torch.float32:
        operation.candidates += matrix_vector_candidates(own, bias, post_ops, chain, srcs, dst)
    apart = build_chain(post_ops, operands, dst, kept, view=(m, n))  # it writes its result before it adds the residual
    for written in dict.fromkeys(in_memory(candidate.dst) for candidate in operation.candidates):
        operation.candidates += lpgemm_candidates((m, k, n), own, bias, post_ops, apart.args, srcs, written)
    operation.candidates += _integer_candidates(node, m, dst, post_ops, operands, context)
    return operation


def _integer_candidates(
    node: fx.Node,
    m: int,
    real: MemoryDesc,
    post_ops: Sequence[PostOp],
    operands: tuple[fx.Node, ...],
    context: LoweringContext,
) -> Iterator[Candidate]:
    """The product of integers, where src and weight are dequantized; matmul where integers are not counted from 0."""
    factors = factors_of(node, context)
    if factors is None:
        return
    n, k = factors.weight.shape
    shape, sum_node = (
        context.values.specs[node.args[0]].shape,
        residual_to_overwrite(node, node.args[0], post_ops, context),
    )
    src = row_major((m, k), factors.src.dtype)
    for wanted in dict.fromkeys((None, wanted_of(node, context.values))):
        dst = real if wanted is None else row_major(real.dims, wanted.dtype)
        integers = told(factors, post_ops, operands, dst, wanted, real, context, sum_node=sum_node, view=(m, n))
        if integers is None:
            continue
        seen = row_major((m, n), dst.dtype or real.dtype)
        srcs = (Quantized(row_major(shape, factors.src.dtype), factors.src), *integers.chain.srcs)
        for describe, dims in ((descriptors.inner_product, (n, k)), (descriptors.matmul, (k, n))):
            is_matmul = describe is descriptors.matmul
            bias = integers.bias
            if bias is not None and is_matmul:
                bias = replace(bias, desc=row_major((1, n), torch.float32))
            weights = MemoryDesc(dims, torch.int8, "any")
            bits = {"src_bits": factors.src.bits, "weights_bits": factors.weights_bits}
            pds = optimized_implementations(
                describe, src, weights, bias and bias.desc, seen, **bits, attr=integers.attr
            )
            packed = PackedWeights(factors.key, factors.weight, transposed=is_matmul)
            args = weighted_arguments(packed, bias, integers.chain, src, seen)
            overwrites = integers.chain.overwrites
            yield from candidates(pds, args, describe.__name__, srcs, integers.dst, overwrites=overwrites)


@dataclass(frozen=True)
class Product:
    """A linear layer on [M, K] with constant weights [N, K]: what both primitives that compute it are made of.

    sizes   M, K and N
    name    of the weight's constant: the key of its packed copies
    result  dtype of what is written
    """

    sizes: tuple[int, int, int]
    dtype: torch.dtype
    weight: torch.Tensor
    name: str
    bias: Weights | None
    chain: Chain
    result: torch.dtype

    @classmethod
    def of_row(cls, weight: torch.Tensor, name: str, chain: Chain) -> Product:
        """One float32 row, no bias."""
        n, k = weight.shape
        return cls((1, k, n), torch.float32, weight, name, None, chain, torch.float32)

    def templates(self) -> Iterator[PrimitiveTemplate]:
        yield from self.as_matmul()
        yield from self.as_inner_product()

    def as_inner_product(self) -> Iterator[PrimitiveTemplate]:
        _, k, n = self.sizes
        return self._templates(descriptors.inner_product, MemoryDesc((n, k), self.dtype, "any"), self.bias)

    def as_matmul(self) -> Iterator[PrimitiveTemplate]:
        """With weights seen as [K, N]. Its kernel packs them the other way round, and reads memory faster."""
        _, k, n = self.sizes
        bias = self.bias and replace(self.bias, desc=row_major((1, n), torch.float32))
        return self._templates(descriptors.matmul, MemoryDesc((k, n), self.dtype, "any"), bias)

    @property
    def _dst(self) -> MemoryDesc:
        return row_major((self.sizes[0], self.sizes[2]), self.result)

    def _templates(
        self, describe: Callable[..., Any], weights: MemoryDesc, bias: Weights | None
    ) -> Iterator[PrimitiveTemplate]:
        src, kind = row_major(self.sizes[:2], self.dtype), describe.__name__
        packed = PackedWeights(self.name, self.weight, transposed=kind == "matmul")
        args = weighted_arguments(packed, bias, self.chain, src, self._dst)
        found = implementations(describe, src, weights, bias and bias.desc, self._dst, post_ops=self.chain.post_ops)
        for pd in sorted(found, key=lambda pd: "gemm:" in pd.implementation):  # seldom the fastest: last among equals
            yield primitive_template(pd, args, kind)


def lower_matmul(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.matmul of two run-time tensors of one rank (2 to 6) whose batch dimensions are equal or one."""
    arguments = context.values.arguments(node)
    a, b = context.tensor(arguments["a"], "a"), context.tensor(arguments["b"], "b")
    if a.ndim != b.ndim or not 2 <= a.ndim <= 6 or a.dtype != b.dtype:
        raise NotLowered(f"operands {a} and {b}: matmul takes two tensors of one dtype and one rank from 2 to 6")
    dtype, base = context.dtype(a), context.values.base(node)
    post_ops = context.post_ops(arguments["post_ops"], base)
    operands = run_time_operands((arguments["a"], arguments["b"]), post_ops)
    flops = 2 * base.numel * a.shape[-1]
    operation = Operation(node, node.name, "matmul", operands, context.values.specs[node], flops=flops)
    dst = row_major(base.shape, dtype)
    chain = build_chain(post_ops, operands, dst, dtype)
    left = row_major(a.shape, dtype)
    rights = dict.fromkeys((row_major(b.shape, dtype), *_transposed(arguments["b"], b, dtype, context)))
    for right in rights:
        found = implementations(descriptors.matmul, left, right, None, dst, post_ops=chain.post_ops)
        args = {ARG_SRC: Operand(0), ARG_WEIGHTS: Operand(1), ARG_DST: Result(), **chain.args}
        operation.candidates += candidates(found, args, "matmul", (left, right, *chain.srcs), dst)
    operation.candidates += _integer_products(operation, [right.strides for right in rights], dst, post_ops, context)
    otherwise = "no optimized matmul implementation takes these shapes"
    return keep_optimized(operation, otherwise, post_ops=len(arguments["post_ops"]))


def _integer_products(
    operation: Operation,
    rights: Sequence[tuple[int, ...] | None],
    real: MemoryDesc,
    post_ops: Sequence[PostOp],
    context: LoweringContext,
) -> Iterator[Candidate]:
    """The product of two values that are integers; kernels take the second one as int8, and one zero point of the two.

    rights  strides of its layouts
    """
    a, b = operation.operands[:2]
    left, right = (numerics_of(node, context.values) for node in (a, b))
    if left is None or right is None:
        return
    if right.dtype == torch.uint8:  # the same numbers, counted from 128 less
        right = Numerics(torch.int8, right.scale, right.zero_point - 128)
    if left.zero_point and right.zero_point:
        return
    scales = torch.tensor([left.scale * right.scale], dtype=torch.float64, device="cpu")
    nothing = torch.empty(0, dtype=torch.int8, device="cpu")
    factors = Factors(left, nothing, "", scales, None, "", weight_zero_point=right.zero_point)
    src, shape = row_major(context.values.specs[a].shape, left.dtype), context.values.specs[b].shape
    for wanted in dict.fromkeys((None, wanted_of(operation.node, context.values))):
        dst = real if wanted is None else row_major(real.dims, wanted.dtype)
        integers = told(factors, post_ops, operation.operands, dst, wanted, real, context)
        for strides in rights if integers is not None else ():
            assert integers is not None and strides is not None
            other = strided(shape, right.dtype, tuple(strides))
            found = optimized_implementations(
                descriptors.matmul, src, other, None, dst, src_bits=left.bits, attr=integers.attr
            )
            args: Arguments = {ARG_SRC: Operand(0, src), ARG_WEIGHTS: Operand(1, other), ARG_DST: Result(dst)}
            args = {**args, **integers.chain.args}
            srcs = (Quantized(src, left), Quantized(other, right), *integers.chain.srcs)
            yield from candidates(found, args, "matmul", srcs, integers.dst)


def _transposed(node: fx.Node, spec: TensorSpec, dtype: torch.dtype, context: LoweringContext) -> list[MemoryDesc]:
    """The layouts in which node's value lies as the transposed view of dense matrices: kernels read those as well."""
    k, n = spec.shape[-2:]
    dense = row_major((*spec.shape[:-2], n, k), dtype).strides
    assert dense is not None
    wanted = (*dense[:-2], 1, k)
    return [strided(spec.shape, dtype, steps) for steps in context.plain_strides(node) if steps == wanted]
