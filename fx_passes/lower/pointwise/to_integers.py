"""Batch normalization and gates that leave integers: one binary primitive multiplies, adds, bounds and rounds.

    q (u8) -> dequantize -> batch_norm, relu -> quantize -> q (u8)        q' = round(relu(a[c] * q + b[c]) + z)

a and b take in the scales and zero points on both sides. On 256 x 56 x 56 numbers and two Zen 5 threads the primitive
takes 52 us; reorders to float32 and back, with the normalization between, took 200.

    value (f32 or u8), gate (f32) -> mul -> quantize -> q (u8)  q' = round(value * gate / scale + z)

A squeeze-and-excitation block ends so: its product is not written in float32 first. The same goes for products and sums
with constants, as SmoothQuant leaves them before linear layers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fx_passes.candidates.candidates import (
    Argument,
    Arguments,
    Candidate,
    Operand,
    PackedWeights,
    PrimitiveTemplate,
    Result,
    Weights,
    primitive_template,
)
from fx_passes.candidates.layouts import Layout, Numerics, Quantized, in_memory, layout, row_major, spatial_tags
from fx_passes.lower.context import LoweringContext
from fx_passes.lower.primitives import candidates, implementations, optimized_implementations
from fx_passes.lower.quantized import numerics_of, wanted_of
from fx_passes.lower.windows.depthwise import channel_products_of_integers
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import (
    ARG_BIAS,
    ARG_DST,
    ARG_SRC,
    ARG_SRC_1,
    ARG_WEIGHTS,
    Attr,
    PostOps,
    arg_post_op,
)
from zendnn_cffi.primitives.memory import MemoryDesc

F32 = torch.float32
_MOST_IMAGES = 64  # of a batch: each is a call


def batch_norm_to_integers(
    node: fx.Node, src: fx.Node, scale: torch.Tensor, shift: torch.Tensor, relu: bool, context: LoweringContext
) -> Iterator[Candidate]:
    """Candidates for scale * src + shift, then relu, where all who read it quantize it alike.

    scale, shift  float64 [C]
    """
    spec, wanted = context.values.specs[src], wanted_of(node, context.values)
    if wanted is None or spec.ndim not in (3, 4, 5) or spec.dtype != torch.float32:
        return
    (tag, *_), known = spatial_tags(spec.ndim), numerics_of(src, context.values)
    kept: list[tuple[Layout, Numerics | None]] = [(layout(spec.shape, context.dtype(spec), tag), None)]
    if known is not None:
        kept.append((Quantized(layout(spec.shape, known.dtype, tag), known), known))
    dst = Quantized(layout(spec.shape, wanted.dtype, tag), wanted)
    channels = row_major((1, spec.shape[1], *(1,) * (spec.ndim - 2)), torch.float32)
    for have, numerics in kept:
        step, zero = (1.0, 0) if numerics is None else (numerics.scale, numerics.zero_point)
        factor = scale * step / wanted.scale
        offset = (shift - scale * step * zero) / wanted.scale
        post_ops = PostOps().binary("add", channels)
        if relu:
            post_ops = post_ops.eltwise("relu", 0.0, 0.0)
            if wanted.zero_point:
                post_ops = post_ops.eltwise("linear", 1.0, float(wanted.zero_point))
        else:
            offset = offset + wanted.zero_point
        args: dict[int, Argument] = {
            ARG_SRC: Operand(0, in_memory(have)),
            ARG_SRC_1: _constant(node, "factor", factor, channels.dims, numerics, wanted),
            arg_post_op(0): _constant(node, "offset", offset, channels.dims, numerics, wanted),
            ARG_DST: Result(dst.desc),
        }
        found = implementations(descriptors.binary, "mul", in_memory(have), channels, dst.desc, attr=Attr(post_ops))
        yield from candidates(found[:1], args, "binary", (have,), dst)
        if isinstance(have, Quantized):
            yield from _as_depthwise(node, have, dst, factor, offset, PostOps(list(post_ops)[1:]))


def _as_depthwise(
    node: fx.Node, have: Quantized, dst: Quantized, factor: torch.Tensor, offset: torch.Tensor, post_ops: PostOps
) -> Iterator[Candidate]:
    """The same as a depthwise convolution of integers, whose weights are the signs of the factors.

    The bias is added before the scales multiply. On 256 x 56 x 56 numbers and two Zen 4 threads it takes 82 us for 107.
    """
    size, sign = factor.abs(), torch.where(factor < 0, -1, 1)
    bias = (offset / size).float()
    if have.desc.ndim != 4 or not (bias.isfinite().all() and size.float().isfinite().all()):
        return  # a channel without a factor has no bias that scales to its offset
    desc = row_major((len(bias),), F32)
    args: Arguments = {
        ARG_SRC: Operand(0, have.desc),
        ARG_WEIGHTS: PackedWeights(f"{node.name} signs", sign.to(torch.int8).reshape(-1, 1, 1, 1, 1)),
        ARG_BIAS: Weights(f"{node.name} bias from {have.numerics} to {dst.numerics}", bias, desc, is_streamed=False),
        ARG_DST: Result(dst.desc),
    }
    found = channel_products_of_integers(have.desc, desc, dst.desc, size.tolist(), post_ops)
    yield from candidates(found, args, "convolution", (have,), dst)


def scaled_to_integers(
    node: fx.Node, kind: str, name: str, constant: torch.Tensor, context: LoweringContext
) -> Iterator[Candidate]:
    """Candidates for a value times or plus a constant that broadcasts to it, where all quantize it alike.

    In regions that compute in bf16 the value is read as float32, too, as normalizations of residual sums leave it.

    name, constant  of the constant, float32
    """
    spec, wanted = context.values.specs[node], wanted_of(node, context.values)
    if wanted is None or kind not in ("mul", "add") or spec.dtype != F32 or constant.dtype != F32:
        return
    other = row_major((1,) * (spec.ndim - constant.ndim) + tuple(constant.shape), F32)
    dst = row_major(spec.shape, wanted.dtype)
    attr = Attr(PostOps().eltwise("linear", 1.0 / wanted.scale, float(wanted.zero_point)))
    args: dict[int, Argument] = {ARG_SRC: Operand(0), ARG_SRC_1: Weights(name, constant, other), ARG_DST: Result(dst)}
    for dtype in dict.fromkeys((context.dtype(spec), F32)):
        src = row_major(spec.shape, dtype)
        found = optimized_implementations(descriptors.binary, kind, src, other, dst, attr=attr)
        yield from candidates(found[:1], args, "binary", (src,), Quantized(dst, wanted))


def gated_to_integers(node: fx.Node, value: fx.Node, context: LoweringContext) -> Iterator[Candidate]:
    """Candidates for value [N, C, H, W] times gate [N, C, 1, 1], where all who read it quantize it alike.

    The value is in float32, or in the integers that it is exactly some of.
    """
    spec, wanted = context.values.specs[node], wanted_of(node, context.values)
    if wanted is None or spec.ndim != 4 or context.dtype(spec) != torch.float32:
        return
    dst = layout(spec.shape, wanted.dtype, "nhwc")
    gate = row_major((*spec.shape[:2], 1, 1), torch.float32)
    src = layout(spec.shape, torch.float32, "nhwc")
    post_ops = PostOps().eltwise("linear", 1.0 / wanted.scale, float(wanted.zero_point))
    args: dict[int, Argument] = {ARG_SRC: Operand(0), ARG_SRC_1: Operand(1), ARG_DST: Result(dst)}
    found = implementations(descriptors.binary, "mul", src, gate, dst, attr=Attr(post_ops))
    yield from candidates(found[:1], args, "binary", (src, gate), Quantized(dst, wanted))
    known = numerics_of(value, context.values)
    if known is not None and spec.shape[0] <= _MOST_IMAGES:
        have = Quantized(layout(spec.shape, known.dtype, "nhwc"), known)
        calls = _gated_images(node, known, gate, dst, wanted)
        if calls:
            implementation = calls[0].pd.implementation
            yield Candidate(implementation, (have, gate), Quantized(dst, wanted), tuple(calls))


def _gated_images(
    node: fx.Node, src: Numerics, gate: MemoryDesc, dst: MemoryDesc, wanted: Numerics
) -> list[PrimitiveTemplate]:
    """(src - z) * gate: all images at once where z is 0, else one by one, as no kernel's post-op differs by images."""
    images = dst.dims[0] if src.zero_point else 1
    shape, gates = ((dims[0] // images, *dims[1:]) for dims in (dst.dims, gate.dims))
    whole, result, factors = (
        layout(shape, src.dtype, "nhwc"),
        layout(shape, wanted.dtype, "nhwc"),
        row_major(gates, F32),
    )
    number = row_major((1, 1, 1, 1), F32)
    post_ops = PostOps().binary("mul", factors) if src.zero_point else PostOps()
    attr = Attr(post_ops.eltwise("linear", src.scale / wanted.scale, float(wanted.zero_point)))
    operands = ("sub", whole, number, result) if src.zero_point else ("mul", whole, factors, result)
    found = optimized_implementations(descriptors.binary, *operands, attr=attr)
    zero_point = _constant(node, "zero point", torch.tensor(src.zero_point, device="cpu"), number.dims, src, wanted)
    calls = []
    for image in range(images if found else 0):
        other = Operand(1, factors, image * factors.size_bytes)
        own: dict[int, Argument] = (
            {ARG_SRC_1: zero_point, arg_post_op(0): other} if src.zero_point else {ARG_SRC_1: other}
        )
        src_argument = Operand(0, whole, image * whole.size_bytes)
        args = {ARG_SRC: src_argument, **own, ARG_DST: Result(result, image * result.size_bytes)}
        calls.append(primitive_template(found[0], args, "binary"))
    return calls


def _constant(
    node: fx.Node, name: str, values: torch.Tensor, shape: tuple[int, ...], have: Numerics | None, want: Numerics
) -> Weights:
    key = f"{node.name} {name} from {have} to {want}"
    return Weights(key, values.float().reshape(shape), row_major(shape, torch.float32), is_streamed=False)
