"""Transposed convolutions with their post-ops: every implementation, in every layout the library has one for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from fx_passes.candidates.candidates import Candidate, Operation, PackedWeights, Result
from fx_passes.candidates.layouts import layout, spatial_tags
from fx_passes.lower.context import LoweringContext, residual_to_overwrite, run_time_operands
from fx_passes.lower.pointwise.in_place import followed_by, in_place
from fx_passes.lower.post_ops import Chain, PostOp, build_chain
from fx_passes.lower.primitives import candidates, implementations, keep_optimized, weighted_arguments
from fx_passes.lower.windows.convolution import Convolution, checked
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc


def lower_deconvolution(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.deconvolution: batched, 1 to 3 dimensions, constant weights, groups, dilation, output padding."""
    arguments = context.values.arguments(node)
    right = tuple(p - o for p, o in zip(arguments["padding"], arguments["output_padding"], strict=True))
    given = checked(node, {**arguments, "padding_l": arguments["padding"], "padding_r": right}, context)
    weight, flops = _library_weight(given.weight, given.groups), 2 * given.src.numel * math.prod(given.weight.shape[1:])
    deconv = replace(given, weight=weight, weight_key=f"{given.weight_key} transposed")
    post_ops = context.post_ops(arguments["post_ops"], deconv.base)
    operands = run_time_operands((arguments["src"],), post_ops)
    operation = Operation(node, node.name, "deconvolution", operands, context.values.specs[node], flops=flops)
    sum_node = residual_to_overwrite(node, arguments["src"], post_ops, context)
    for tag in spatial_tags(deconv.src.ndim):
        src = layout(deconv.src.shape, deconv.dtype, tag)
        dst = layout(deconv.base.shape, deconv.dtype, tag)
        operation.candidates += _candidates(deconv, post_ops, operands, src, dst, sum_node)
    otherwise = "no optimized deconvolution implementation takes these shapes"
    return keep_optimized(operation, otherwise, post_ops=len(arguments["post_ops"]))


def _library_weight(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """PyTorch's [C, O / G, *k] as the library has it: [O, C, *k], or [G, O / G, C / G, *k] with groups. A view."""
    if groups == 1:
        return weight.transpose(0, 1)
    return weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).transpose(1, 2)


def _candidates(
    deconv: Convolution,
    post_ops: Sequence[PostOp],
    operands: Sequence[fx.Node],
    src: MemoryDesc,
    dst: MemoryDesc,
    sum_node: fx.Node | None,
) -> list[Candidate]:
    """Every usable implementation for one choice of layouts: with its post-ops, or before a primitive for these."""

    def chain_of(entries: Sequence[PostOp], sum_node: fx.Node | None = None) -> Chain:
        return build_chain(entries, operands, dst, deconv.dtype, sum_node=sum_node)

    def offered(chain: Chain) -> list[PrimitiveDesc]:
        weight, bias = MemoryDesc(tuple(deconv.weight.shape), deconv.dtype, "any"), deconv.bias and deconv.bias.desc
        steps = deconv.steps
        return implementations(descriptors.deconvolution, src, weight, bias, dst, **steps, post_ops=chain.post_ops)

    chain, weights = chain_of(post_ops, sum_node), PackedWeights(deconv.weight_key, deconv.weight)
    found = offered(chain)
    args = weighted_arguments(weights, deconv.bias, chain)
    fused = candidates(found, args, "deconvolution", (src, *chain.srcs), dst, overwrites=chain.overwrites)
    behind = in_place(Result(), dst, post_ops, chain_of) if post_ops else ()
    if not behind:
        return fused
    nothing = chain_of(())  # kernels that take post-ops are several times as slow with some of them
    args = weighted_arguments(weights, deconv.bias, nothing)
    apart = candidates(offered(nothing), args, "deconvolution", (src, *chain_of(post_ops).srcs), dst)
    return [*fused, *(followed_by(each, behind) for each in apart)]
