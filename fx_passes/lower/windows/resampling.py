"""Interpolation of images, where the library's rule for which pixels to read is PyTorch's."""

from __future__ import annotations

from torch import fx

from fx_passes.candidates.candidates import Arguments, Operand, Operation, Result
from fx_passes.candidates.layouts import layout, spatial_tags
from fx_passes.lower.context import LoweringContext, NotLowered
from fx_passes.lower.primitives import candidates, implementations, keep_optimized
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC


def lower_resample(node: fx.Node, context: LoweringContext) -> Operation:
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


def _exact(scale_factor: object, pairs: list[tuple[int, int]]) -> bool:
    """Whether the scale factor, where one is given, says no more than the sizes do."""
    if scale_factor is None:
        return True
    factors = scale_factor if isinstance(scale_factor, tuple | list) else [scale_factor] * len(pairs)
    return all(old * factor == new for (old, new), factor in zip(pairs, factors, strict=True))
