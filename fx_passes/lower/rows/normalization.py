"""Batch normalization that no convolution absorbed, layer normalization, softmax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fx_passes.candidates.candidates import (
    Argument,
    Arguments,
    Candidate,
    Operand,
    Operation,
    PackedWeights,
    Result,
    Weights,
)
from fx_passes.candidates.layouts import Quantized, activation_layouts, layout, row_major, spatial_tags
from fx_passes.lower.context import (
    LoweringContext,
    NotLowered,
    constant_name,
)
from fx_passes.lower.pointwise.to_integers import batch_norm_to_integers
from fx_passes.lower.post_ops import EltwisePostOp
from fx_passes.lower.primitives import candidates, implementations, keep_optimized, optimized_implementations
from fx_passes.lower.quantized import wanted_of
from fx_passes.lower.residuals import kept_dtype
from fx_passes.lower.windows.depthwise import channel_products
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import (
    ARG_BIAS,
    ARG_DST,
    ARG_MEAN,
    ARG_SCALE,
    ARG_SHIFT,
    ARG_SRC,
    ARG_VARIANCE,
    ARG_WEIGHTS,
    Attr,
    PostOps,
)

_RELU = EltwisePostOp("relu", 0.0, 0.0)


def lower_batch_norm(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.batch_norm with constant statistics, with a relu after it."""
    arguments = context.values.arguments(node)
    src = context.tensor(arguments["src"], "src")
    if src.ndim < 2:
        raise NotLowered(f"src {src} has no channel dimension")
    dtype = context.dtype(src)
    post_ops = context.post_ops(arguments["post_ops"], context.values.base(node), lambda chain: chain == [_RELU])
    channels = src.shape[1]
    constants: dict[int, Argument] = {}
    stats = row_major((channels,), torch.float32)
    for arg, name in ((ARG_MEAN, "mean"), (ARG_VARIANCE, "var"), (ARG_SCALE, "weight"), (ARG_SHIFT, "bias")):
        if arguments[name] is not None:
            tensor = context.constant(arguments[name], name)
            constants[arg] = Weights(constant_name(node, name), tensor, stats)
    operation = Operation(node, node.name, "batch_normalization", (arguments["src"],), context.values.specs[node])
    scale, shift = _scale_and_shift(arguments, dtype)
    if src.ndim == 4:
        operation.candidates += _as_depthwise(node, scale, shift, src.shape, dtype, relu=bool(post_ops))
    operation.candidates += batch_norm_to_integers(node, arguments["src"], scale, shift, bool(post_ops), context)
    for desc in activation_layouts(src.shape, dtype):
        found = implementations(
            descriptors.batch_normalization,
            desc,
            arguments["eps"],
            scale=ARG_SCALE in constants,
            shift=ARG_SHIFT in constants,
            relu=bool(post_ops),
        )
        args: Arguments = {ARG_SRC: Operand(0), ARG_DST: Result(), **constants}
        operation.candidates += candidates(found, args, "batch_normalization", (desc,), desc, may_overwrite=0)
    return keep_optimized(operation, "only a reference implementation takes this batch normalization")


def _scale_and_shift(arguments: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of each channel, float64, that it multiplies by and then adds."""
    mean, var = (arguments[name].double() for name in ("mean", "var"))
    scale = (var + arguments["eps"]).rsqrt() * (1.0 if arguments["weight"] is None else arguments["weight"].double())
    scale = scale.to(dtype).double()  # rounded before the shift is made of it, so that x = mean stays exact
    return scale, (0.0 if arguments["bias"] is None else arguments["bias"].double()) - mean * scale


def _as_depthwise(
    node: fx.Node, scale: torch.Tensor, shift: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, relu: bool
) -> Iterator[Candidate]:
    """A batch normalization as a 1x1 convolution of each channel by itself, whose kernels stream faster.

    2.5 times on channels-last f32, 4 times on channels-last bf16, 1.25 times on blocks of channels in bf16.
    """
    channels = shape[1]
    weight, bias = scale.float().reshape(channels, 1, 1, 1, 1), shift.float()
    bias_desc = row_major((channels,), torch.float32)
    post_ops = PostOps().eltwise("relu", 0.0) if relu else PostOps()
    args: Arguments = {
        ARG_SRC: Operand(0),
        ARG_WEIGHTS: PackedWeights(f"{node.name} scale", weight),
        ARG_BIAS: Weights(f"{node.name} shift", bias, bias_desc),
        ARG_DST: Result(),
    }
    for tag in spatial_tags(4)[:2]:
        desc = layout(shape, dtype, tag)
        found = channel_products(desc, bias_desc, post_ops)
        yield from candidates(found, args, "convolution", (desc,), desc)


def lower_layer_norm(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.layer_norm over the last dimension with constant scale and shift."""
    arguments = context.values.arguments(node)
    src = context.tensor(arguments["src"], "src")
    if len(arguments["normalized_shape"]) != 1 or src.ndim < 2:
        raise NotLowered("the primitive normalizes the last dimension alone")
    dtype = kept_dtype(node, context)
    rows, size = src.numel // src.shape[-1], src.shape[-1]
    constants: dict[int, Argument] = {}
    for arg, name in ((ARG_SCALE, "weight"), (ARG_SHIFT, "bias")):
        if arguments[name] is not None:
            tensor = context.constant(arguments[name], name)
            constants[arg] = Weights(constant_name(node, name), tensor, row_major((size,), torch.float32))
    view, desc = row_major((rows, size), dtype), row_major(src.shape, dtype)
    operation = Operation(node, node.name, "layer_normalization", (arguments["src"],), context.values.specs[node])
    scale, shift = ARG_SCALE in constants, ARG_SHIFT in constants
    found = implementations(descriptors.layer_normalization, view, arguments["eps"], scale=scale, shift=shift)
    args: Arguments = {ARG_SRC: Operand(0, view), ARG_DST: Result(view), **constants}
    operation.candidates += candidates(found, args, "layer_normalization", (desc,), desc)
    return keep_optimized(operation, "only a reference implementation takes this layer normalization")


def lower_softmax(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.softmax over the last dimension, the one with an optimized implementation."""
    arguments = context.values.arguments(node)
    src = context.tensor(arguments["src"], "src")
    axis = arguments["dim"] % max(src.ndim, 1)
    if src.ndim < 1 or axis != src.ndim - 1:
        raise NotLowered("softmax over another dimension than the last has only a reference implementation")
    dtype = context.dtype(src)
    desc = row_major(src.shape, dtype)
    operation = Operation(node, node.name, "softmax", (arguments["src"],), context.values.specs[node])
    found = implementations(descriptors.softmax, desc, axis, log=arguments["log"])
    args: Arguments = {ARG_SRC: Operand(0), ARG_DST: Result()}
    operation.candidates += candidates(found, args, "softmax", (desc,), desc)
    wanted = wanted_of(node, context.values)
    if wanted is not None and not wanted.zero_point and not arguments["log"]:
        dst = row_major(src.shape, wanted.dtype)
        attr = Attr(output_scales=[1.0 / wanted.scale])
        found = optimized_implementations(descriptors.softmax, desc, axis, dst=dst, attr=attr)
        operation.candidates += candidates(found, args, "softmax", (desc,), Quantized(dst, wanted))
    return keep_optimized(operation, "only a reference implementation takes this softmax")
