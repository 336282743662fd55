"""Transposed convolutions with their post-ops: every implementation, in every layout the library has one for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fx_passes.candidates.candidates import Candidate, Operand, Operation, PackedWeights, Result, Weights
from fx_passes.candidates.layouts import layout, row_major, spatial_tags
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.context import (
    LoweringContext,
    NotLowered,
    residual_to_overwrite,
    run_time_operands,
)
from fx_passes.lower.post_ops import PostOp, build_chain
from fx_passes.lower.primitives import candidates, implementations, keep_optimized
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_BIAS, ARG_DST, ARG_SRC, ARG_WEIGHTS
from zendnn_cffi.primitives.memory import MemoryDesc


@dataclass(frozen=True)
class _Deconvolution:
    """A deconvolution node's arguments, checked. padding_r is the library's: padding minus output_padding."""

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
    bias = None if arguments["bias"] is None else context.constant(arguments["bias"], "bias")
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
        f"{node.args[1]} transposed",
        str(node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")),
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
    bias = None if deconv.bias is None else row_major(tuple(deconv.bias.shape), torch.float32)

    found = implementations(
        descriptors.deconvolution,
        src,
        MemoryDesc(tuple(deconv.weight.shape), deconv.dtype, "any"),
        bias,
        dst,
        strides=deconv.stride,
        dilation=deconv.dilation,
        padding_l=deconv.padding_l,
        padding_r=deconv.padding_r,
        post_ops=chain.post_ops,
    )
    packed = PackedWeights(deconv.weight_key, deconv.weight)
    args = {ARG_SRC: Operand(0), ARG_WEIGHTS: packed, ARG_DST: Result(), **chain.args}
    if deconv.bias is not None and bias is not None:
        args[ARG_BIAS] = Weights(deconv.bias_key, deconv.bias, bias)
    return candidates(found, args, "deconvolution", (src, *chain.srcs), dst, overwrites=chain.overwrites)
