"""Interpolation: F.interpolate and the modules that call it."""

from __future__ import annotations

from typing import Any

from torch import nn

from fx_passes import ops
from fx_passes.spellings import builders as b

MODES = ("nearest", "linear", "bilinear", "trilinear")


def interpolate(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: Any = "nearest",
    align_corners: Any = None,
    recompute_scale_factor: Any = None,
    antialias: Any = False,
) -> b.Built:
    """F.interpolate in the modes that ops.resample has; not with aligned corners or antialiasing."""
    if mode not in MODES or align_corners or recompute_scale_factor or antialias:
        return None
    return b.Call(ops.resample, (input, mode, size, scale_factor))


def upsample(module: Any, parameter: Any, args: tuple[Any, ...]) -> b.Built:
    """nn.Upsample."""
    (src,) = args
    return interpolate(
        src, module.size, module.scale_factor, module.mode, module.align_corners, module.recompute_scale_factor
    )


MODULES = {nn.Upsample: upsample, nn.UpsamplingNearest2d: upsample}
