"""Transposed convolutions with their post-ops: every implementation, in every layout the library has one for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fx_passes.candidates.candidates import Candidate, Operation, PackedWeights, Weights
from fx_passes.candidates.layouts import layout, spatial_tags
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.context import (
    LoweringContext,
    NotLowered,
    bias_weights,
    constant_name,
    residual_to_overwrite,
    run_time_operands,
)
from fx_passes.lower.post_ops import PostOp, build_chain
from fx_passes.lower.primitives import candidates, implementations, keep_optimized, weighted_arguments
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.memory import MemoryDesc


@dataclass(frozen=True)
class _Deconvolution:
    """A deconvolution node's arguments, checked. padding_r is the library's: padding minus output_padding."""

    src: TensorSpec
    base: TensorSpec
    weight: torch.Tensor
    bias: Weights | None
    weight_key: str
    stride: tuple[int, ...]
    padding_l: tuple[int, ...]
    padding_r: tuple[int, ...]
    dilation: tuple[int, ...]
    dtype: torch.dtype
    flops: int


def lower_deconvolution(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.deconvolution: batched, 1 to 3 dimensions, constant weights, groups, dilation, output padding."""
    arguments = context.values.arguments(node)
    deconv = _checked(node, arguments, context)
    post_ops = context.post_ops(arguments["post_ops"], deconv.base)
    operands = run_time_operands((arguments["src"],), post_ops)
    operation = Operation(node, node.name, "deconvolution", operands, context.values.specs[node], flops=deconv.flops)
    sum_node = residual_to_overwrite(node, arguments["src"], post_ops, context)
    for tag in spatial_tags(deconv.src.ndim):
        src = layout(deconv.src.shape, deconv.dtype, tag)
        dst = layout(deconv.base.shape, deconv.dtype, tag)
        operation.candidates += _candidates(deconv, post_ops, operands, src, dst, sum_node)
    otherwise = "no optimized deconvolution implementation takes these shapes"
    return keep_optimized(operation, otherwise, post_ops=len(arguments["post_ops"]))


def _checked(node: fx.Node, arguments: dict[str, Any], context: LoweringContext) -> _Deconvolution:
    src = context.tensor(arguments["src"], "src")
    weight = context.constant(arguments["weight"], "weight")
    bias = bias_weights(node, arguments["bias"], context)
    stride, padding = tuple(arguments["stride"]), tuple(arguments["padding"])
    if src.ndim != len(stride) + 2:
        raise NotLowered(f"src {src} has no batch dimension")
    if src.dtype != weight.dtype:
        raise NotLowered(f"src {src} and the weight have different dtypes")
    return _Deconvolution(
        src,
        context.values.base(node),
        _library_weight(weight, arguments["groups"]),
        bias,
        f"{constant_name(node, 'weight')} transposed",
        stride,
        padding,
        tuple(p - o for p, o in zip(padding, arguments["output_padding"], strict=True)),
        tuple(arguments["dilation"]),
        context.dtype(src),
        2 * src.numel * math.prod(weight.shape[1:]),
    )


def _library_weight(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """PyTorch's [C, O / G, *k] as the library has it: [O, C, *k], or [G, O / G, C / G, *k] with groups. A view."""
    if groups == 1:
        return weight.transpose(0, 1)
    return weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).transpose(1, 2)


def _candidates(
    deconv: _Deconvolution,
    post_ops: Sequence[PostOp],
    operands: Sequence[fx.Node],
    src: MemoryDesc,
    dst: MemoryDesc,
    sum_node: fx.Node | None,
) -> list[Candidate]:
    """Every usable implementation for one choice of layouts."""
    chain = build_chain(post_ops, operands, dst, deconv.dtype, sum_node=sum_node)
    found = implementations(
        descriptors.deconvolution,
        src,
        MemoryDesc(tuple(deconv.weight.shape), deconv.dtype, "any"),
        deconv.bias and deconv.bias.desc,
        dst,
        strides=deconv.stride,
        dilation=deconv.dilation,
        padding_l=deconv.padding_l,
        padding_r=deconv.padding_r,
        post_ops=chain.post_ops,
    )
    args = weighted_arguments(PackedWeights(deconv.weight_key, deconv.weight), deconv.bias, chain)
    return candidates(found, args, "deconvolution", (src, *chain.srcs), dst, overwrites=chain.overwrites)
