"""Pooling: windows, adaptive and global; spatial means, which PyTorch computes as well."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import fx

from fx_passes.candidates.candidates import Arguments, Candidate, Operand, Operation, Result, TorchTemplate
from fx_passes.candidates.layouts import (
    Layout,
    Numerics,
    Quantized,
    channels_of_a_block,
    in_memory,
    layout,
    row_major,
    spatial_tags,
)
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.context import LoweringContext, NotLowered
from fx_passes.lower.primitives import candidates, implementations, keep_optimized
from fx_passes.lower.quantized import numerics_of, wanted_of
from fx_passes.lower.rows.reduction import by_pytorch, loses_digits, lower_norm, lower_reduction
from fx_passes.lower.windows.winograd import may_be_float32, takes_winograd
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC
from zendnn_cffi.primitives.memory import MemoryDesc

Sizes = tuple[int, ...]


def lower_pool(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.pool. ceil_mode is more padding on the right, as long as no window starts in it."""
    arguments = context.values.arguments(node)
    src, spec = context.tensor(arguments["src"], "src"), context.values.specs[node]
    kernel, stride, dilation = (tuple(arguments[name]) for name in ("kernel", "stride", "dilation"))
    left, right = tuple(arguments["padding_l"]), tuple(arguments["padding_r"])
    if src.ndim != len(kernel) + 2:
        raise NotLowered(f"src {src} has no batch dimension")
    if any(d != 1 for d in dilation):
        raise NotLowered("dilated pooling has only a reference implementation")
    if arguments["ceil_mode"]:
        needed = [
            (out - 1) * s + k - size - pad
            for out, s, k, size, pad in zip(spec.shape[2:], stride, kernel, src.shape[2:], left, strict=True)
        ]
        if arguments["kind"] == "avg_include_padding" and any(n > r for n, r in zip(needed, right, strict=True)):
            raise NotLowered("ceil_mode counts part of a window only: no primitive divides that way")
        right = tuple(max(n, 0) for n in needed)
    return _pooling(node, context, arguments["src"], arguments["kind"], kernel, stride, left, right)


def lower_adaptive_pool(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.adaptive_pool where every window has the same size: the input divides evenly."""
    arguments = context.values.arguments(node)
    src, spec = context.tensor(arguments["src"], "src"), context.values.specs[node]
    sizes, out = src.shape[2:], spec.shape[2:]
    if src.ndim != len(arguments["output_size"]) + 2 or any(n % m for n, m in zip(sizes, out, strict=True)):
        raise NotLowered(f"adaptive pooling of {list(sizes)} to {list(out)} has windows of different sizes")
    kernel = tuple(n // m for n, m in zip(sizes, out, strict=True))
    zero = (0,) * len(kernel)
    kind = {"avg": "avg_exclude_padding", "max": "max"}[arguments["kind"]]
    return _pooling(node, context, arguments["src"], kind, kernel, kernel, zero, zero)


def lower_reduce(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower a mean over all spatial dimensions as global pooling, others and sums over the last ones as reduction."""
    arguments = context.values.arguments(node)
    if arguments["kind"] in ("max", "min"):
        raise NotLowered(f"the library's {arguments['kind']} of nothing but infinities is a finite number")
    src = context.tensor(arguments["src"], "src")
    dims = {d % src.ndim for d in arguments["dims"]} if src.ndim else set()
    if arguments["kind"] == "norm":
        return lower_norm(node, context, arguments["src"], dims)
    if arguments["kind"] != "mean" or src.ndim not in (3, 4, 5) or dims != set(range(2, src.ndim)):
        return lower_reduction(node, context, arguments["src"], arguments["kind"], dims)
    zero = (0,) * (src.ndim - 2)
    return _pooling(node, context, arguments["src"], "avg_exclude_padding", src.shape[2:], src.shape[2:], zero, zero)


def _pooling(
    node: fx.Node,
    context: LoweringContext,
    src_node: fx.Node,
    kind: str,
    kernel: Sizes,
    stride: Sizes,
    left: Sizes,
    right: Sizes,
) -> Operation:
    """A pooling primitive in every layout; a node that drops the pooled dimensions sees its result without them."""
    src, spec = context.values.specs[src_node], context.values.specs[node]
    dtype = context.dtype(src)
    shape = _output_shape(src, kernel, stride, left, right)
    keeps_rank, is_mean = len(spec.shape) == len(shape), kind == "avg_exclude_padding" and kernel == src.shape[2:]
    if keeps_rank and shape != spec.shape:
        raise NotLowered(f"windows give {list(shape)}, eager {list(spec.shape)}")
    operation = Operation(node, node.name, "pooling", (src_node,), spec)
    dtypes = (dtype, torch.float32) if _lies_in_float32(node, src_node, dtype, context) else (dtype,)
    tags = spatial_tags(src.ndim)
    pairs: list[tuple[Layout, Layout]] = [
        (layout(src.shape, dtype, tag), layout(shape, dtype, tag)) for dtype, tag in itertools.product(dtypes, tags)
    ]
    numerics = _integers(node, src_node, kind, any((*left, *right)), context)
    if numerics is not None:
        whole, pooled = (Quantized(layout(dims, numerics.dtype, tags[0]), numerics) for dims in (src.shape, shape))
        pairs.append((whole, pooled))
    for have, leave in pairs:
        src_desc, dst_desc = in_memory(have), in_memory(leave)
        dst = leave
        if not keeps_rank:
            flat = row_major(spec.shape, leave.dtype or dtype)
            if flat.size_bytes != dst_desc.size_bytes:
                continue  # padded blocks cannot be seen without their spatial dimensions
            dst = Quantized(flat, leave.numerics) if isinstance(leave, Quantized) else flat
        if is_mean and src_desc.dtype is not None and src_desc.dtype.is_floating_point:
            means = _mean_by_pytorch(src_desc, dst_desc)
            operation.candidates += [Candidate("torch", (have,), dst, (mean,)) for mean in means]
            if loses_digits(math.prod(kernel), src_desc.dtype):
                continue
        found = implementations(
            descriptors.pooling,
            kind,
            src_desc,
            dst_desc,
            kernel=kernel,
            strides=stride,
            dilation=(1,) * len(kernel),
            padding_l=left,
            padding_r=right,
        )
        args: Arguments = {ARG_SRC: Operand(0, src_desc), ARG_DST: Result(dst_desc)}
        operation.candidates += candidates(found, args, "pooling", (have,), dst)
    return keep_optimized(operation, "only a reference implementation takes this pooling")


def _mean_by_pytorch(src: MemoryDesc, dst: MemoryDesc) -> list[TorchTemplate]:
    """The mean over all spatial dimensions, where no padding is among the channels of a block."""
    dims = tuple(range(2, src.ndim))
    if not src.is_plain:
        if src.dims[1] % channels_of_a_block():
            return []
        src, dst = _blocks_in_rows(src), _blocks_in_rows(dst)
    return [by_pytorch("mean", src, dims, dst)]


def _blocks_in_rows(desc: MemoryDesc) -> MemoryDesc:
    """[N, C, ...] in blocks of channels as it lies: [N, C / 16, ..., 16], for instance."""
    samples, channels, *spatial = desc.dims
    assert desc.dtype is not None
    block = channels_of_a_block()
    return row_major((samples, channels // block, *spatial, block), desc.dtype)


def _integers(node: fx.Node, src_node: fx.Node, kind: str, padded: bool, context: LoweringContext) -> Numerics | None:
    """The integers to pool, and to leave: a maximum is one of them, means have to be quantized alike afterwards."""
    numerics = numerics_of(src_node, context.values)
    if numerics is None or kind == "max":
        return numerics
    if padded and kind == "avg_include_padding" and numerics.zero_point:
        return None  # borders are kept as 0, which stands for another number
    return numerics if wanted_of(node, context.values) == numerics else None


def _lies_in_float32(node: fx.Node, src_node: fx.Node, dtype: torch.dtype, context: LoweringContext) -> bool:
    """Whether a Winograd convolution may read the result or write the source, where all else is bf16."""
    return dtype == torch.bfloat16 and (takes_winograd(src_node, context) or may_be_float32(node, context))


def _output_shape(src: TensorSpec, kernel: Sizes, stride: Sizes, left: Sizes, right: Sizes) -> Sizes:
    spatial: Sequence[int] = [
        (n + pl + pr - k) // s + 1 for n, k, s, pl, pr in zip(src.shape[2:], kernel, stride, left, right, strict=True)
    ]
    return (*src.shape[:2], *spatial)
