"""Reorders between two layouts of one value, which quantize and dequantize on the way."""

from __future__ import annotations

import torch

from fx_passes.candidates.candidates import Argument, Operand, PrimitiveTemplate, Result, Weights, primitive_template
from fx_passes.candidates.layouts import Layout, Quantized, in_memory, row_major
from zendnn_cffi.primitives.attributes import ARG_ATTR_ZERO_POINTS, ARG_DST, ARG_SRC, Attr
from zendnn_cffi.primitives.primitive import PrimitiveDesc


def conversion(have: Layout, want: Layout) -> PrimitiveTemplate:
    """The reorder of operand 0, which lies in layout `have`, into layout `want`."""
    args: dict[int, Argument] = {ARG_SRC: Operand(0, in_memory(have)), ARG_DST: Result(in_memory(want))}
    scale = 1.0
    zero_points: dict[int, int] = {}
    if isinstance(have, Quantized):
        scale *= have.numerics.scale
        zero_points[ARG_SRC] = have.numerics.zero_point
    if isinstance(want, Quantized):
        scale /= want.numerics.scale
        zero_points[ARG_DST] = want.numerics.zero_point
    args |= zero_point_arguments(zero_points)
    attr = Attr(output_scales=None if scale == 1.0 else scale, zero_points=zero_point_masks(zero_points))
    return primitive_template(PrimitiveDesc.reorder(in_memory(have), in_memory(want), attr), args, "reorder")


def zero_point_masks(zero_points: dict[int, int]) -> dict[int, int]:
    """What attributes say of zero points that are the same for all of a tensor; none of those that are 0."""
    return {arg: 0 for arg, number in zero_points.items() if number}


def zero_point_arguments(zero_points: dict[int, int]) -> dict[int, Argument]:
    """The arguments that go with zero_point_masks."""
    return {ARG_ATTR_ZERO_POINTS | arg: zero_point(number) for arg, number in zero_points.items() if number}


def zero_point(number: int) -> Weights:
    """One zero point in memory."""
    plain = torch.tensor([number], dtype=torch.int32, device="cpu")
    return Weights(f"zero point {number}", plain, row_major((1,), torch.int32), is_streamed=False)
