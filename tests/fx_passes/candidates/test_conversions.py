"""Conversions between float32 and bf16: by PyTorch where nothing else changes, and the same numbers as a reorder's.

Those of float16 are by PyTorch in any strides. The library does the rest in a second step, where layouts have blocks.

Those to and from integers keep their zero points, whatever order dimensions lie in.
"""

from __future__ import annotations

import pytest
import torch

from fx_passes.candidates import conversions
from fx_passes.candidates.candidates import PrimitiveTemplate, TorchTemplate
from fx_passes.candidates.conversions import conversion, fastest_conversion, in_steps
from fx_passes.candidates.layouts import Layout, Numerics, Quantized, layout, row_major, strided
from fx_passes.layout.reorder import reorder_into
from fx_passes.search.measure import reorder_fingerprint, time_reorder
from tests.support.lowering import noise
from zendnn_cffi.primitives.memory import Memory
from zendnn_cffi.primitives.verification.check import check
from zendnn_cffi.primitives.verification.unchecked import unchecked

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
U8, S8 = torch.uint8, torch.int8


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


@pytest.mark.parametrize("to_float16", [False, True])
@pytest.mark.parametrize("other", [F32, BF16], ids=str)
@pytest.mark.parametrize("steps", [[(1, 17), (17, 1)], [(32, 1), (17, 1)], [(1, 5), (1, 5)]], ids=str)
def test_float16_in_any_strides_is_a_call_of_pytorch(
    steps: list[tuple[int, int]], other: torch.dtype, to_float16: bool
) -> None:
    dtypes = (other, F16) if to_float16 else (F16, other)
    have, want = (strided((5, 17), dtype, s) for dtype, s in zip(dtypes, steps, strict=True))
    (step,) = in_steps(have, want)
    template = fastest_conversion(*step)
    assert isinstance(template, TorchTemplate) and template.kind == "reorder"
    assert time_reorder(have, want) > 0 and "torch" in reorder_fingerprint(have, want)


@pytest.mark.parametrize("tag", ["nChw16c", "nchw", "nhwc"])
@pytest.mark.parametrize("channels", [16, 17])
def test_float16_into_blocks_is_two_steps(channels: int, tag: str) -> None:
    """And the numbers are PyTorch's either way."""
    shape = (2, channels, 3, 5)
    x = noise(*shape, dtype=F16)
    blocks = layout(shape, F32, tag)
    steps = in_steps(row_major(shape, F16), blocks)
    assert len(steps) == (2 if tag == "nChw16c" else 1)
    assert len(in_steps(blocks, row_major(shape, F16))) == len(steps)
    inside, back = torch.empty(blocks.size_bytes, dtype=U8), torch.empty(x.numel() * 4, dtype=U8)
    reorder_into(x, inside, blocks)
    reorder_into(Memory(blocks, inside), back, row_major(shape, F32))
    assert torch.equal(back.view(F32).view(shape), x.float())


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


def test_one_check_is_for_all_scales_and_zero_points_of_the_same_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network has a scale for each of a hundred values, and a check takes a tenth of a second."""
    checked = []
    monkeypatch.setattr(conversions, "check", lambda pd: checked.append(pd) or check(pd))
    shape = (3, 19, 7, 9)
    have, want = row_major(shape, F32), strided(shape, U8, _strides(shape, "acdb"))
    found = [
        len(in_steps(have, Quantized(want, Numerics(U8, scale, zero_point))))
        for scale, zero_point in ((0.5, 3), (1e-4, 255), (7.0, 128), (7.0, 0))
    ]
    assert len(checked) == 1 and found[:3] == [found[0]] * 3 and found[3] == 1
    in_steps(
        row_major((4, *shape[1:]), F32), Quantized(strided((4, *shape[1:]), U8, want.strides), Numerics(U8, 0.5, 3))
    )
    assert len(checked) == 2


def _kept(real: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    limits = torch.iinfo(numerics.dtype)
    return (real / numerics.scale).round().add(numerics.zero_point).clamp(limits.min, limits.max).to(numerics.dtype)


@pytest.mark.parametrize("dtypes", [(F32, U8), (U8, F32), (U8, S8)], ids=str)
@pytest.mark.parametrize("steps", [(0, 0, 0, 0), (0, 64, 8, 1), (64, 0, 8, 1), (17, 1, 0, 0)], ids=str)
def test_expanded_values_are_laid_out_on_the_way(
    steps: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    shape, numerics = (2, 17, 8, 8), [Numerics(dtype, 0.5, zero) for dtype, zero in zip(dtypes, (0, 5), strict=True)]
    have, want = strided(shape, dtypes[0], steps), strided(shape, dtypes[1], _strides(shape, "acdb"))
    real = noise(2 * 17 * 64) * 20
    memory = real if dtypes[0] is F32 else _kept(real, numerics[0])
    source = memory.as_strided(shape, steps)
    real = source if dtypes[0] is F32 else source.float() * 0.5
    target = torch.empty_strided(shape, want.strides, dtype=want.dtype)
    numbers = None if dtypes[0] is F32 else Quantized(have, numerics[0])
    goal = want if dtypes[1] is F32 else Quantized(want, numerics[1])
    with unchecked():
        reorder_into(Memory(have, source), target.as_strided((target.numel(),), (1,)), goal, numbers=numbers)
    expected = real if dtypes[1] is F32 else _kept(real, numerics[1]).float()
    assert (target.float() - expected).abs().max() <= (1e-5 if dtypes[1] is F32 else 1)
    assert (target.float() - expected).abs().mean() < 0.1  # midway numbers alone
