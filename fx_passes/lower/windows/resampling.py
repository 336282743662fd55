"""Interpolation of images: by primitives where the library's rule for which pixels to read is PyTorch's."""

from __future__ import annotations

import torch
from torch import fx

from fx_passes.candidates.candidates import Arguments, Candidate, Operand, Operation, Result, TorchTemplate
from fx_passes.candidates.layouts import layout, row_major, spatial_tags
from fx_passes.lower.context import LoweringContext, NotLowered
from fx_passes.lower.primitives import candidates, implementations, keep_optimized
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC


def lower_resample(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.resample in every layout; what no primitive computes is PyTorch's, on images as they lie."""
    try:
        return _by_primitives(node, context)
    except NotLowered as reason:
        return _by_pytorch(node, context, str(reason))


def _by_primitives(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.resample in every layout.

    "nearest" only by whole factors: the library reads the pixel nearest to the centre (nearest-exact), PyTorch the one
    at the corner. A scale factor only where it is the ratio of the sizes: the library knows the sizes alone.
    """
    arguments = context.values.arguments(node)
    src, spec, kind = context.tensor(arguments["src"], "src"), context.values.specs[node], arguments["kind"]
    algorithm = "nearest" if kind == "nearest" else "linear"
    dtype = context.dtype(src)
    if not spatial_tags(src.ndim):
        raise NotLowered(f"src {src} is not [N, C, *spatial]")
    if arguments["align_corners"]:
        raise NotLowered("the library has no aligned corners")
    pairs = list(zip(src.shape[2:], spec.shape[2:], strict=True))
    if kind == "nearest" and any(new % old for old, new in pairs):
        raise NotLowered("nearest by other than whole factors reads other pixels than PyTorch's")
    if not _exact(arguments["scale_factor"], pairs):
        raise NotLowered(f"scale factor {arguments['scale_factor']} is not the ratio of the sizes")
    operation = Operation(node, node.name, "resampling", (arguments["src"],), spec)
    for tag in spatial_tags(src.ndim):
        src_desc, dst_desc = layout(src.shape, dtype, tag), layout(spec.shape, dtype, tag)
        found = implementations(descriptors.resampling, algorithm, src_desc, dst_desc)
        args: Arguments = {ARG_SRC: Operand(0), ARG_DST: Result()}
        operation.candidates += candidates(found, args, "resampling", (src_desc,), dst_desc)
    return keep_optimized(operation, "only a reference implementation takes this resampling")


def _by_pytorch(node: fx.Node, context: LoweringContext, reason: str) -> Operation:
    """PyTorch's kernel, row-major and channels last: no reorder before and behind it."""
    arguments = context.values.arguments(node)
    src, spec = context.tensor(arguments["src"], "src"), context.values.specs[node]
    if src.ndim not in (4, 5):
        raise NotLowered(reason)
    dtype = context.dtype(src)
    operation = Operation(node, node.name, "resampling", (arguments["src"],), spec)
    key = f"{torch.__version__} resample {arguments['kind']} {arguments['scale_factor']} {arguments['align_corners']}"
    template = TorchTemplate(context.values.computation(node, operation.operands), reason, key=key)
    for tag in ("", spatial_tags(src.ndim)[0]):
        src_desc, dst_desc = (layout(s, dtype, tag) if tag else row_major(s, dtype) for s in (src.shape, spec.shape))
        operation.candidates.append(Candidate("torch", (src_desc,), dst_desc, (template,)))
    return operation


def _exact(scale_factor: object, pairs: list[tuple[int, int]]) -> bool:
    """Whether the scale factor, where one is given, says no more than the sizes do."""
    if scale_factor is None:
        return True
    factors = scale_factor if isinstance(scale_factor, tuple | list) else [scale_factor] * len(pairs)
    return all(old * factor == new for (old, new), factor in zip(pairs, factors, strict=True))
