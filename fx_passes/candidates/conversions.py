"""Reorders between two layouts of one value, which quantize and dequantize on the way."""

from __future__ import annotations

import functools

import torch

from fx_passes.candidates.candidates import (
    Argument,
    Operand,
    PrimitiveTemplate,
    Result,
    Template,
    TorchTemplate,
    Weights,
    primitive_template,
)
from fx_passes.candidates.layouts import Layout, Numerics, Quantized, contiguous_strides, in_memory, row_major, strided
from zendnn_cffi.primitives.attributes import ARG_ATTR_ZERO_POINTS, ARG_DST, ARG_SRC, Attr
from zendnn_cffi.primitives.checks import strides_overlap
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc
from zendnn_cffi.primitives.verification.check import check
from zendnn_cffi.primitives.verification.first_use import LIMIT_BYTES
from zendnn_cffi.primitives.verification.unchecked import unchecked

_FLOATS = {torch.float32, torch.bfloat16}


def fastest_conversion(have: Layout, want: Layout) -> Template:
    """The same as conversion, by PyTorch where that alone rounds to bf16, or back, row by row.

    Its loop takes a third of the reorder's time: 7.7 us against 20 for 128 x 768 on one Zen 4 thread. Of float16 the
    library has a plain reference alone, which takes 200 times as long as PyTorch.
    """
    if not is_by_torch(have, want):
        return conversion(have, want)
    args = Operand(0, in_memory(have)), Result(in_memory(want))
    return TorchTemplate(lambda src, out: out.copy_(src), "", True, args=args, assists=True, kind="reorder")


def in_steps(have: Layout, want: Layout) -> list[tuple[Layout, Layout]]:
    """The reorders that convert `have` into `want`, one after the other: one, or two where one answers wrongly, or
    where PyTorch converts float16 and the library the layout.

    Reorders that change the order of dimensions ignore zero points for some sizes (17 channels of 64 pixels). Two
    change the order and the numbers apart. An expanded value is laid out first: nothing is written to its layout.
    """
    if (between := _beside_float16(have, want)) is not None:
        return [(have, between), (between, want)]
    if _loses_zero_points(have, want, torch.get_num_threads()):
        if isinstance(have, Quantized):
            moved = Quantized(_ordered_like(want, have.numerics.dtype), have.numerics)
            return [(in_memory(have), in_memory(moved)), (moved, want)]
        assert isinstance(want, Quantized)
        if _is_expanded(have):
            laid_out = _ordered_like(want, have.dtype)
            return [(have, laid_out), (laid_out, want)]
        kept = Quantized(_ordered_like(have, want.numerics.dtype), want.numerics)
        return [(have, kept), (in_memory(kept), in_memory(want))]
    return [(have, want)]


def _beside_float16(have: Layout, want: Layout) -> MemoryDesc | None:
    """What float16 is converted to, or from, before the library does the rest; None where nothing is left for it."""
    if have.dtype == want.dtype or torch.float16 not in (have.dtype, want.dtype) or is_by_torch(have, want):
        return None
    return _ordered_like(*((have, torch.float32) if have.dtype == torch.float16 else (want, torch.float32)))


def _ordered_like(other: Layout, dtype: torch.dtype) -> MemoryDesc:
    assert other.strides is not None
    return strided(tuple(other.dims), dtype, tuple(other.strides))


def _loses_zero_points(have: Layout, want: Layout, threads: int) -> bool:
    """Whether the reorder has zero points, changes the order of plain dimensions, and gives wrong numbers on noise.

    Those of expanded values count, too: no check writes its noise to such.
    """
    numbers = [desc.numerics for desc in (have, want) if isinstance(desc, Quantized)]
    if not any(n.zero_point for n in numbers) or have.strides == want.strides or None in (have.strides, want.strides):
        return False
    if have.size_bytes + want.size_bytes > LIMIT_BYTES or _is_expanded(have):
        return True
    scales = (2.0**-6, 2.0**-5) if _scale(have, want) != 1.0 else (1.0, 1.0)
    return _is_wrong(*map(_told_apart, (have, want), scales), threads)


@functools.lru_cache(maxsize=4096)
def _is_wrong(have: Layout, want: Layout, threads: int) -> bool:
    with unchecked():
        return not check(conversion(have, want).pd).right


def _told_apart(desc: Layout, scale: float) -> Layout:
    """The layout of values whose zero point shows where it is ignored: other numbers go the same way through a reorder.

    So one check is for all values of these sizes, and no range of theirs hides what is wrong.
    """
    if not isinstance(desc, Quantized):
        return desc
    kept = desc.numerics
    zero_point = kept.zero_point and (64 if kept.dtype == torch.uint8 else 5)
    return Quantized(desc.desc, Numerics(kept.dtype, scale, zero_point, kept.bits))


def _is_expanded(have: Layout) -> bool:
    return have.strides is not None and strides_overlap(tuple(have.dims), tuple(have.strides))


def is_by_torch(have: Layout, want: Layout) -> bool:
    """Whether fastest_conversion is a call of PyTorch."""
    if have.dims != want.dims or None in (have.strides, want.strides):
        return False
    if torch.float16 in (have.dtype, want.dtype):
        return {have.dtype, want.dtype} <= {*_FLOATS, torch.float16}
    return {have.dtype, want.dtype} == _FLOATS and have.strides == want.strides == contiguous_strides(tuple(have.dims))


def _scale(have: Layout, want: Layout) -> float:
    """What numbers are multiplied with; without a scale, 1, it is another implementation."""
    from_, to = (desc.numerics.scale if isinstance(desc, Quantized) else 1.0 for desc in (have, want))
    return from_ / to


def conversion(have: Layout, want: Layout) -> PrimitiveTemplate:
    """The reorder of operand 0, which lies in layout `have`, into layout `want`."""
    args: dict[int, Argument] = {ARG_SRC: Operand(0, in_memory(have)), ARG_DST: Result(in_memory(want))}
    scale = _scale(have, want)
    zero_points: dict[int, int] = {}
    if isinstance(have, Quantized):
        zero_points[ARG_SRC] = have.numerics.zero_point
    if isinstance(want, Quantized):
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
