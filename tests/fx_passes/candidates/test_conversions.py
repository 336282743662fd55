"""Conversions between float32 and bf16: by PyTorch where nothing else changes, and the same numbers as a reorder's.

Those to and from integers keep their zero points, whatever order dimensions lie in.
"""

from __future__ import annotations

import pytest
import torch

from fx_passes.candidates.candidates import PrimitiveTemplate, TorchTemplate
from fx_passes.candidates.conversions import conversion, fastest_conversion
from fx_passes.candidates.layouts import Layout, Numerics, Quantized, layout, row_major, strided
from fx_passes.layout.reorder import reorder_into
from fx_passes.search.measure import reorder_fingerprint, time_reorder
from tests.support.lowering import noise
from zendnn_cffi.primitives.memory import Memory
from zendnn_cffi.primitives.verification.unchecked import unchecked

F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtypes", [(F32, BF16), (BF16, F32)], ids=str)
@pytest.mark.parametrize("shape", [(3,), (1, 1), (5, 17), (2, 3, 17), (2, 3, 1, 5)], ids=str)
def test_rounding_alone_is_a_call_of_pytorch(shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    have, want = (row_major(shape, dtype) for dtype in dtypes)
    template = fastest_conversion(have, want)
    assert isinstance(template, TorchTemplate) and template.kind == "reorder"
    src, out = noise(*shape).to(dtypes[0]), torch.empty(shape, dtype=dtypes[1])
    template.function(src, out)
    assert torch.equal(out, src.to(dtypes[1]))
    assert time_reorder(have, want) > 0 and "torch" in reorder_fingerprint(have, want)


INTEGERS = Quantized(row_major((2, 16, 3, 3), torch.uint8), Numerics(torch.uint8, 0.5, 3))
OTHERS: dict[str, tuple[Layout, Layout]] = {
    "another order": (row_major((2, 16, 3, 3), F32), layout((2, 16, 3, 3), BF16, "nhwc")),
    "blocks": (layout((2, 16, 3, 3), F32, "nChw16c"), layout((2, 16, 3, 3), BF16, "nChw16c")),
    "gaps": (strided((4, 8), F32, (16, 1)), strided((4, 8), BF16, (16, 1))),
    "one dtype": (row_major((2, 16, 3, 3), F32), layout((2, 16, 3, 3), F32, "nhwc")),
    "integers": (row_major((2, 16, 3, 3), F32), INTEGERS),
    "from integers": (INTEGERS, row_major((2, 16, 3, 3), BF16)),
}


@pytest.mark.parametrize("have, want", OTHERS.values(), ids=OTHERS)
def test_everything_else_is_a_reorder(have: Layout, want: Layout) -> None:
    template = fastest_conversion(have, want)
    assert isinstance(template, PrimitiveTemplate) and str(template) == str(conversion(have, want))
    assert "torch" not in reorder_fingerprint(have, want).replace("torch.", "")


U8, S8 = torch.uint8, torch.int8
# Sizes for which the library's transposing reorders ignore zero points, and one for which they do not
SIZES = {
    "17 channels of 64 pixels": ((2, 17, 8, 8), "abcd", "acdb"),
    "64 channels of 25 pixels": ((2, 64, 5, 5), "acdb", "abcd"),
    "tiles of 8 x 8": ((3, 8, 8), "abc", "acb"),
    "16 channels": ((2, 16, 8, 8), "abcd", "acdb"),
}


def _strides(shape: tuple[int, ...], order: str) -> tuple[int, ...]:
    axes = ["abcd".index(letter) for letter in order]
    return torch.empty([shape[axis] for axis in axes]).permute([axes.index(d) for d in range(len(axes))]).stride()


@pytest.mark.parametrize("zero_points", [(3, 0), (126, -2), (0, 5)], ids=str)
@pytest.mark.parametrize("dtypes", [(F32, U8), (F32, S8), (U8, F32), (S8, F32), (U8, S8), (S8, U8)], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_zero_points_survive_another_order(
    size: str, dtypes: tuple[torch.dtype, torch.dtype], zero_points: tuple[int, int]
) -> None:
    shape, *orders = SIZES[size]
    have, want = (strided(shape, dtype, _strides(shape, order)) for dtype, order in zip(dtypes, orders, strict=True))
    numerics = [Numerics(t, 0.5, z) for t, z in zip(dtypes, zero_points, strict=True)]
    real = noise(*shape) * 20
    source, target = (torch.empty_strided(shape, desc.strides, dtype=desc.dtype) for desc in (have, want))
    source.copy_(_kept(real, numerics[0]) if dtypes[0] is not F32 else real)
    numbers, goal = None, want
    if dtypes[0] is not F32:
        numbers = Quantized(have, numerics[0])
        real = (source.float() - numerics[0].zero_point) * 0.5
    if dtypes[1] is not F32:
        goal = Quantized(want, numerics[1])
    flat = target.as_strided((target.numel(),), (1,))
    with unchecked():  # as the compiler, which compares results itself
        reorder_into(Memory(have, source), flat, goal, numbers=numbers)
    expected = real if dtypes[1] is F32 else _kept(real, numerics[1]).float()
    assert (target.float() - expected).abs().max() <= (1e-5 if dtypes[1] is F32 else 1)
    assert (target.float() - expected).abs().mean() < 0.1  # midway numbers alone


def _kept(real: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    limits = torch.iinfo(numerics.dtype)
    return (real / numerics.scale).round().add(numerics.zero_point).clamp(limits.min, limits.max).to(numerics.dtype)
