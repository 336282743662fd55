"""Interpolation: F.interpolate and the modules that call it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import ops
from fx_passes.spellings.registry import Built, Call, row, spelled

aten = torch.ops.aten

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
    """F.interpolate in the modes that ops.resample has; not with antialiasing."""
    if mode not in MODES or recompute_scale_factor or antialias or align_corners not in (None, False, True):
        return None
    if align_corners is not None and mode == "nearest":  # which eager refuses
        return None
    corners = (True,) if align_corners else ()
    return Call(ops.resample, (input, mode, size, scale_factor, *corners))


def _as_exported(mode: str, overload: Any) -> None:
    """The row of what torch.export makes of F.interpolate in this mode."""

    def nearest(input: Any, output_size: Any, scale_factors: Any = None) -> Built:
        return interpolate(input, _tuple(output_size), _tuple(scale_factors), mode)

    def linear(input: Any, output_size: Any, align_corners: Any, scale_factors: Any = None) -> Built:
        return interpolate(input, _tuple(output_size), _tuple(scale_factors), mode, align_corners)

    row(nearest if mode == "nearest" else linear, overloads=[overload])


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


for _overload in (aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec):
    _as_exported("nearest", _overload)
_as_exported("linear", aten.upsample_linear1d.vec)
_as_exported("bilinear", aten.upsample_bilinear2d.vec)
_as_exported("trilinear", aten.upsample_trilinear3d.vec)
