"""Interpolation: F.interpolate and the modules that call it."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn

from fx_passes import ops
from fx_passes.spellings.registry import Built, Call, spelled

MODES = ("nearest", "linear", "bilinear", "trilinear")


_UPSAMPLE = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")


@spelled(functions=[F.interpolate], modules={nn.Upsample: _UPSAMPLE, nn.UpsamplingNearest2d: _UPSAMPLE})
def interpolate(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: Any = "nearest",
    align_corners: Any = None,
    recompute_scale_factor: Any = None,
    antialias: Any = False,
) -> Built:
    """F.interpolate in the modes that ops.resample has; not with aligned corners or antialiasing."""
    if mode not in MODES or align_corners or recompute_scale_factor or antialias:
        return None
    return Call(ops.resample, (input, mode, size, scale_factor))
