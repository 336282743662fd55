"""Convolutions with their post-ops: every implementation, in every layout the library has one for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fx_passes.candidates.candidates import (
    Argument,
    Candidate,
    Operand,
    Operation,
    Result,
    Weights,
    packed_weights,
    primitive_template,
)
from fx_passes.candidates.layouts import layout, row_major, spatial_tags
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.context import (
    LoweringContext,
    NotLowered,
    SplitPostOps,
    optimized,
    residual_to_overwrite,
    run_time_operands,
    usable_implementations,
)
from fx_passes.lower.post_ops import PostOp, build_chain, fits_view
from fx_passes.lower.windows.gated_weights import GATED
from fx_passes.lower.windows.winograd import result_dtypes, takes_winograd
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_BIAS, ARG_DST, ARG_SRC, ARG_WEIGHTS, Attr
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc

_FEW_CHANNELS = 4  # up to here a kernel may read plain nchw and write blocks: the first layer of a network


@dataclass(frozen=True)
class _Convolution:
    """A convolution node's arguments, checked.

    weight_node  the node that computes the weight at run time (weight is then a meta tensor), None for a constant
    """

    src: TensorSpec
    base: TensorSpec
    weight: torch.Tensor
    bias: torch.Tensor | None
    weight_key: str
    bias_key: str
    stride: tuple[int, ...]
    padding_l: tuple[int, ...]
    padding_r: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    weight_node: fx.Node | None = None

    @property
    def grouped_weight(self) -> torch.Tensor:
        """The weight as primitives see it: [O, I, ...], or [G, O / G, I / G, ...] with groups."""
        if self.groups == 1:
            return self.weight
        return self.weight.reshape(self.groups, self.weight.shape[0] // self.groups, *self.weight.shape[1:])

    @property
    def flops(self) -> int:
        return 2 * self.base.numel * math.prod(self.weight.shape[1:])


def lower_convolution(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.convolution: a batched convolution of 1 to 3 dimensions; weights are constant, or gated."""
    arguments = context.values.arguments(node)
    conv = _checked(node, arguments, context)
    post_ops = context.post_ops(arguments["post_ops"], conv.base)
    src_node = arguments["src"]
    own = (src_node,) if conv.weight_node is None else (src_node, conv.weight_node)
    operands = run_time_operands(own, post_ops)
    operation = Operation(node, node.name, "convolution", operands, context.values.specs[node], flops=conv.flops)
    sum_node = residual_to_overwrite(node, src_node, post_ops, context)
    for result in result_dtypes(node, conv.dtype, context):
        for src, dst in _layout_pairs(conv, conv.dtype, result):
            operation.candidates += _candidates(conv, post_ops, operands, src, dst, "direct", sum_node)
        if _is_matrix_product(conv) and all(fits_view(p, channel_axis=1) for p in post_ops):
            operation.candidates += _inner_product_candidates(conv, post_ops, operands, sum_node, result)
    if takes_winograd(node, context):
        for src, dst in _layout_pairs(conv, torch.float32, torch.float32):
            operation.candidates += _candidates(conv, post_ops, operands, src, dst, "winograd", sum_node)
    fast = optimized(operation.candidates)
    if not fast and post_ops:
        raise SplitPostOps(len(arguments["post_ops"]) - 1)
    if not operation.candidates:
        raise NotLowered("no convolution implementation takes these shapes")
    operation.candidates = fast or operation.candidates[:1]
    return operation


def _checked(node: fx.Node, arguments: dict[str, Any], context: LoweringContext) -> _Convolution:
    src = context.tensor(arguments["src"], "src")
    weight_node, weight = _weight(arguments["weight"], context)
    bias = None if arguments["bias"] is None else context.constant(arguments["bias"], "bias")
    stride: tuple[int, ...] = tuple(arguments["stride"])
    if src.ndim != len(stride) + 2:
        raise NotLowered(f"src {src} has no batch dimension")
    if src.dtype != weight.dtype:
        raise NotLowered(f"src {src} and the weight have different dtypes")
    named = node.args[1] if len(node.args) > 1 else node.kwargs["weight"]
    bias_node = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    return _Convolution(
        src,
        context.values.base(node),
        weight,
        bias,
        str(named),
        str(bias_node),
        stride,
        tuple(arguments["padding_l"]),
        tuple(arguments["padding_r"]),
        tuple(arguments["dilation"]),
        arguments["groups"],
        context.dtype(src),
        weight_node,
    )


def _weight(value: object, context: LoweringContext) -> tuple[fx.Node | None, torch.Tensor]:
    """Weights multiplied with a gate at run time and their shape, or None and the constant."""
    if isinstance(value, fx.Node) and value.meta.get(GATED):
        spec = context.tensor(value, "weight")
        return value, torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    return None, context.constant(value, "weight")


def _layout_pairs(
    conv: _Convolution, dtype: torch.dtype, result: torch.dtype
) -> Iterator[tuple[MemoryDesc, MemoryDesc]]:
    """The (src, dst) layouts to ask for, src of dtype, dst of dtype result."""
    tags = spatial_tags(conv.src.ndim)
    for tag in tags[:2]:
        yield layout(conv.src.shape, dtype, tag), layout(conv.base.shape, result, tag)
    if conv.src.shape[1] <= _FEW_CHANNELS:
        for tag in tags[:2]:
            yield layout(conv.src.shape, dtype, tags[2]), layout(conv.base.shape, result, tag)


def _candidates(
    conv: _Convolution,
    post_ops: Sequence[PostOp],
    operands: Sequence[fx.Node],
    src: MemoryDesc,
    dst: MemoryDesc,
    algorithm: str,
    sum_node: fx.Node | None,
) -> Iterator[Candidate]:
    """Every usable implementation for one choice of layouts, dtypes and algorithm."""
    assert src.dtype is not None and dst.dtype is not None
    chain = build_chain(post_ops, operands, dst, dst.dtype, sum_node=sum_node)
    weight = conv.grouped_weight
    any_weight = MemoryDesc(weight.shape, src.dtype, "any")
    bias = None if conv.bias is None else row_major(tuple(conv.bias.shape), torch.float32)

    def create() -> PrimitiveDesc:
        desc = descriptors.convolution(
            src,
            any_weight,
            bias,
            dst,
            strides=conv.stride,
            dilation=conv.dilation,
            padding_l=conv.padding_l,
            padding_r=conv.padding_r,
            algorithm=algorithm,
        )
        return PrimitiveDesc(desc, Attr(chain.post_ops))

    for pd in usable_implementations(create):
        args: dict[int, Argument] = {
            ARG_SRC: Operand(0),
            ARG_WEIGHTS: packed_weights(conv.weight_key, weight, pd),
            ARG_DST: Result(),
            **chain.args,
        }
        wanted = (src, *chain.srcs)
        if conv.weight_node is not None:
            assert pd.weights_desc is not None
            args[ARG_WEIGHTS], wanted = Operand(1), (src, pd.weights_desc, *chain.srcs)
        if conv.bias is not None and bias is not None:
            args[ARG_BIAS] = Weights(conv.bias_key, conv.bias, bias)
        template = primitive_template(pd, args, "convolution")
        yield Candidate(pd.implementation, wanted, dst, (template,), overwrites=chain.overwrites)


def _is_matrix_product(conv: _Convolution) -> bool:
    """Whether it multiplies each pixel's channels by one constant matrix: 1x1, stride 1, no padding, no groups."""
    if conv.weight_node is not None:
        return False
    ones = {1, *conv.weight.shape[2:], *conv.stride, conv.groups} == {1}
    return ones and not any((*conv.padding_l, *conv.padding_r))


def _inner_product_candidates(
    conv: _Convolution,
    post_ops: Sequence[PostOp],
    operands: Sequence[fx.Node],
    sum_node: fx.Node | None,
    result: torch.dtype,
) -> Iterator[Candidate]:
    """A 1x1 convolution on channels-last activations as one inner_product over all pixels, which has faster kernels."""
    tag = spatial_tags(conv.src.ndim)[0]
    src, dst = layout(conv.src.shape, conv.dtype, tag), layout(conv.base.shape, result, tag)
    n, k = conv.weight.shape[:2]
    m = conv.src.numel // k
    src_view, dst_view = row_major((m, k), conv.dtype), row_major((m, n), result)
    chain = build_chain(post_ops, operands, dst, result, sum_node=sum_node, view=(m, n), channel_axis=1)
    bias = None if conv.bias is None else row_major((n,), torch.float32)

    def create() -> PrimitiveDesc:
        desc = descriptors.inner_product(src_view, MemoryDesc((n, k), conv.dtype, "any"), bias, dst_view)
        return PrimitiveDesc(desc, Attr(chain.post_ops))

    for pd in usable_implementations(create):
        if pd.implementation.startswith("ref"):
            continue
        args: dict[int, Argument] = {
            ARG_SRC: Operand(0, src_view),
            ARG_WEIGHTS: packed_weights(conv.weight_key, conv.weight.reshape(n, k), pd),
            ARG_DST: Result(dst_view),
            **chain.args,
        }
        if conv.bias is not None and bias is not None:
            args[ARG_BIAS] = Weights(conv.bias_key, conv.bias, bias)
        template = primitive_template(pd, args, "inner_product")
        yield Candidate(pd.implementation, (src, *chain.srcs), dst, (template,), overwrites=chain.overwrites)
