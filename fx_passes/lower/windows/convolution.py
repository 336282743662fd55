"""Convolutions with their post-ops: every implementation, in every layout the library has one for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fx_passes.candidates.candidates import Candidate, Operand, Operation, PackedWeights, Weights
from fx_passes.candidates.layouts import Quantized, in_memory, layout, row_major, spatial_tags
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.context import (
    LoweringContext,
    NotLowered,
    bias_weights,
    constant_name,
    residual_to_overwrite,
    run_time_operands,
)
from fx_passes.lower.post_ops import PostOp, build_chain, fit_view
from fx_passes.lower.primitives import (
    candidates,
    implementations,
    keep_optimized,
    optimized_implementations,
    weighted_arguments,
)
from fx_passes.lower.products.lpgemm import lpgemm_candidates
from fx_passes.lower.quantized import factors_of, told, wanted_of
from fx_passes.lower.windows.gated_weights import GATED
from fx_passes.lower.windows.winograd import result_dtypes, takes_winograd
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_WEIGHTS
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.values import dataclass

_FEW_CHANNELS = 4  # up to here a kernel may read plain nchw and write blocks: the first layer of a network
# Below, a reference implementation takes less than calling PyTorch does. Above, PyTorch's kernel wins: a depthwise one
# of 31 taps over 128 channels and 100 steps takes 2.2 ms and 0.2 ms.
_FEW_FLOPS = 10_000


@dataclass(frozen=True)
class Convolution:
    """The arguments of a convolution or deconvolution, checked.

    weight_node  the node that computes the weight at run time (weight is then a meta tensor), None for a constant
    late         computes a constant weight once it is packed (weight is then a meta tensor)
    """

    src: TensorSpec
    base: TensorSpec
    weight: torch.Tensor
    bias: Weights | None
    weight_key: str
    stride: tuple[int, ...]
    padding_l: tuple[int, ...]
    padding_r: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    weight_node: fx.Node | None = None
    late: Callable[[], torch.Tensor] | None = None

    @property
    def grouped_weight(self) -> torch.Tensor:
        """The weight as primitives see it: [O, I, ...], or [G, O / G, I / G, ...] with groups."""
        return self.grouped(self.weight)

    def grouped(self, weight: torch.Tensor) -> torch.Tensor:
        """A tensor of the weight's shape as primitives see it."""
        if self.groups == 1:
            return weight
        return weight.reshape(self.groups, weight.shape[0] // self.groups, *weight.shape[1:])

    @property
    def steps(self) -> dict[str, Any]:
        """How its windows lie, as descriptors take it."""
        steps = {"strides": self.stride, "dilation": self.dilation}
        return {**steps, "padding_l": self.padding_l, "padding_r": self.padding_r}

    @property
    def flops(self) -> int:
        return 2 * self.base.numel * math.prod(self.weight.shape[1:])


def lower_convolution(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.convolution: a batched convolution of 1 to 3 dimensions; weights are constant, or gated."""
    arguments = context.values.arguments(node)
    conv = checked(node, arguments, context)
    post_ops = context.post_ops(arguments["post_ops"], conv.base)
    src_node = arguments["src"]
    own = (src_node,) if conv.weight_node is None else (src_node, conv.weight_node)
    operands = run_time_operands(own, post_ops)
    operation = Operation(node, node.name, "convolution", operands, context.values.specs[node], flops=conv.flops)
    sum_node = residual_to_overwrite(node, src_node, post_ops, context)
    for result in result_dtypes(node, conv.dtype, context):
        for src, dst in _layout_pairs(conv, conv.dtype, result):
            operation.candidates += _candidates(conv, post_ops, operands, src, dst, "direct", sum_node)
        if _is_matrix_product(conv) and fit_view(post_ops, channel_axis=1):
            operation.candidates += _inner_product_candidates(conv, post_ops, operands, sum_node, result)
    operation.candidates += _integer_candidates(node, conv, post_ops, operands, sum_node, context)
    if takes_winograd(node, context):
        for src, dst in _layout_pairs(conv, torch.float32, torch.float32):
            operation.candidates += _candidates(conv, post_ops, operands, src, dst, "winograd", sum_node)
    otherwise = "no convolution implementation takes these shapes"
    or_reference = conv.weight_node is not None or conv.flops < _FEW_FLOPS
    return keep_optimized(operation, otherwise, post_ops=len(arguments["post_ops"]), or_reference=or_reference)


def checked(node: fx.Node, arguments: dict[str, Any], context: LoweringContext) -> Convolution:
    """What node is given, seen as the library sees it. Raises NotLowered."""
    src = context.tensor(arguments["src"], "src")
    weight_node, weight = _weight(arguments["weight"], context)
    bias = bias_weights(node, arguments["bias"], context)
    stride: tuple[int, ...] = tuple(arguments["stride"])
    if src.ndim != len(stride) + 2:
        raise NotLowered(f"src {src} has no batch dimension")
    if src.dtype != weight.dtype:
        raise NotLowered(f"src {src} and the weight have different dtypes")
    return Convolution(
        src,
        context.values.base(node),
        weight,
        bias,
        constant_name(node, "weight"),
        stride,
        tuple(arguments["padding_l"]),
        tuple(arguments["padding_r"]),
        tuple(arguments["dilation"]),
        arguments["groups"],
        context.dtype(src),
        weight_node,
        context.values.late(node.args[1]) if weight.is_meta and weight_node is None else None,
    )


def _weight(value: object, context: LoweringContext) -> tuple[fx.Node | None, torch.Tensor]:
    """Weights multiplied with a gate at run time and their shape, or None and the constant."""
    if isinstance(value, fx.Node) and value.meta.get(GATED):
        spec = context.tensor(value, "weight")
        return value, torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    return None, context.constant(value, "weight")


def _layout_pairs(
    conv: Convolution, dtype: torch.dtype, result: torch.dtype
) -> Iterator[tuple[MemoryDesc, MemoryDesc]]:
    """The (src, dst) layouts to ask for, src of dtype, dst of dtype result."""
    tags = spatial_tags(conv.src.ndim)
    for tag in tags[:2]:
        yield layout(conv.src.shape, dtype, tag), layout(conv.base.shape, result, tag)
    if conv.src.shape[1] <= _FEW_CHANNELS:
        for tag in tags[:2]:
            yield layout(conv.src.shape, dtype, tags[2]), layout(conv.base.shape, result, tag)


def _candidates(
    conv: Convolution,
    post_ops: Sequence[PostOp],
    operands: Sequence[fx.Node],
    src: MemoryDesc,
    dst: MemoryDesc,
    algorithm: str,
    sum_node: fx.Node | None,
) -> list[Candidate]:
    """Every usable implementation for one choice of layouts, dtypes and algorithm."""
    assert src.dtype is not None and dst.dtype is not None
    chain = build_chain(post_ops, operands, dst, dst.dtype, sum_node=sum_node)
    weight = conv.grouped_weight
    found = implementations(
        descriptors.convolution,
        src,
        MemoryDesc(weight.shape, src.dtype, "any"),
        conv.bias and conv.bias.desc,
        dst,
        **conv.steps,
        algorithm=algorithm,
        post_ops=chain.post_ops,
    )
    args = weighted_arguments(PackedWeights(conv.weight_key, weight, late=conv.late), conv.bias, chain)
    if conv.weight_node is None:
        return candidates(found, args, "convolution", (src, *chain.srcs), dst, overwrites=chain.overwrites)
    args[ARG_WEIGHTS] = Operand(1)
    gated: list[Candidate] = []
    for pd in found:
        assert pd.weights_desc is not None
        wanted = (src, pd.weights_desc, *chain.srcs)
        gated += candidates([pd], args, "convolution", wanted, dst, overwrites=chain.overwrites)
    return gated


def _integer_candidates(
    node: fx.Node,
    conv: Convolution,
    post_ops: Sequence[PostOp],
    operands: Sequence[fx.Node],
    sum_node: fx.Node | None,
    context: LoweringContext,
) -> list[Candidate]:
    """The convolution of integers, where src and weight are dequantized: kernels for that know channels last alone."""
    factors = factors_of(node, context)
    if factors is None or conv.weight_node is not None:
        return []
    tag = spatial_tags(conv.src.ndim)[0]
    src = layout(conv.src.shape, factors.src.dtype, tag)
    weight = conv.grouped(factors.weight)
    real = layout(conv.base.shape, conv.dtype, tag)
    found: list[Candidate] = []
    for wanted in dict.fromkeys((None, wanted_of(node, context.values))):
        dst = real if wanted is None else layout(conv.base.shape, wanted.dtype, tag)
        integers = told(factors, post_ops, operands, dst, wanted, real, context, sum_node=sum_node)
        if integers is None:
            continue
        pds = optimized_implementations(
            descriptors.convolution,
            src,
            MemoryDesc(weight.shape, torch.int8, "any"),
            integers.bias and integers.bias.desc,
            dst,
            **conv.steps,
            src_bits=factors.src.bits,
            weights_bits=factors.weights_bits,
            attr=integers.attr,
        )
        args = weighted_arguments(PackedWeights(factors.key, weight), integers.bias, integers.chain, src, dst)
        srcs = (Quantized(src, factors.src), *integers.chain.srcs)
        overwrites = integers.chain.overwrites
        found += candidates(pds, args, "convolution", srcs, integers.dst, overwrites=overwrites)
    return found


def _is_matrix_product(conv: Convolution) -> bool:
    """Whether it multiplies each pixel's channels by one constant matrix: 1x1, stride 1, no padding, no groups."""
    if conv.weight_node is not None:
        return False
    ones = {1, *conv.weight.shape[2:], *conv.stride, conv.groups} == {1}
    return ones and not any((*conv.padding_l, *conv.padding_r))


def _inner_product_candidates(
    conv: Convolution,
    post_ops: Sequence[PostOp],
    operands: Sequence[fx.Node],
    sum_node: fx.Node | None,
    result: torch.dtype,
) -> Iterator[Candidate]:
    """A 1x1 convolution on channels-last activations as one product over all pixels, which has faster kernels."""
    tag = spatial_tags(conv.src.ndim)[0]
    src, dst = layout(conv.src.shape, conv.dtype, tag), layout(conv.base.shape, result, tag)
    n, k = conv.weight.shape[:2]
    m = conv.src.numel // k
    src_view, dst_view = row_major((m, k), conv.dtype), row_major((m, n), result)
    chain = build_chain(post_ops, operands, dst, result, sum_node=sum_node, view=(m, n), channel_axis=1)
    bias, weights = conv.bias and conv.bias.desc, MemoryDesc((n, k), conv.dtype, "any")
    found = optimized_implementations(
        descriptors.inner_product, src_view, weights, bias, dst_view, post_ops=chain.post_ops
    )
    packed = PackedWeights(conv.weight_key, conv.weight.reshape(n, k), late=conv.late)
    args = weighted_arguments(packed, conv.bias, chain, src_view, dst_view)
    yield from candidates(found, args, "inner_product", (src, *chain.srcs), dst, overwrites=chain.overwrites)
    own = Weights(conv.weight_key, packed.plain, row_major((n, k), conv.dtype), late=conv.late)
    apart = build_chain(post_ops, operands, dst, result, view=(m, n), channel_axis=1)  # adds the residual itself
    yield from lpgemm_candidates(
        (m, k, n), own, conv.bias, post_ops, apart.args, (src, *map(in_memory, apart.srcs)), dst
    )
