"""Weighted sums of bilinear samples by bags of rows, against float64's F.grid_sample."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.tolerance import assert_close
from zendnn_cffi.runtime import weighted_samples
from zendnn_cffi.runtime.weighted_samples import Level, WeightedSamples, samples_by_pytorch

Operands = tuple[list[Tensor], list[Tensor], Tensor]


def operands(
    sizes: Sequence[tuple[int, int]],
    points: Sequence[int],
    shape: tuple[int, int, int],
    *,
    side_by_side: bool = True,
    seed: int,
) -> Operands:
    """Maps whose D numbers lie side by side, of each sample by itself or of all; samples beyond the maps, too."""
    generator = torch.Generator().manual_seed(seed)
    n, d, queries = shape
    maps = []
    for height, width in sizes:
        numbers = torch.randn(height, width, n, d, generator=generator)
        maps.append(numbers.permute(2, 3, 0, 1) if side_by_side else numbers.permute(2, 0, 1, 3).contiguous())
    if not side_by_side:
        maps = [each.permute(0, 3, 1, 2) for each in maps]
    grids = [torch.rand(n, queries, count, 2, generator=generator) * 3 - 1.5 for count in points]
    return maps, grids, torch.rand(n, 1, queries, sum(points), generator=generator)


def by_bags(given: Operands, align_corners: bool = False) -> Tensor:
    """What the class makes of them."""
    maps, grids, weights = given
    n, d, queries = maps[0].shape[0], maps[0].shape[1], weights.shape[2]
    levels = []
    for each, grid in zip(maps, grids, strict=True):
        step, _, line, pixel = (number // d for number in each.stride())
        levels.append(Level(each.shape[2], each.shape[3], grid.shape[2], (step, line, pixel)))
    function = WeightedSamples(levels, (n, d, queries), align_corners)
    scratch = torch.full((function.scratch_numbers,), math.nan)
    out = torch.full((n, queries, d), math.nan).transpose(1, 2)
    function(*maps, *grids, weights, scratch, out)
    return out


def exact(given: Operands, align_corners: bool = False) -> Tensor:
    maps, grids, weights = given
    return samples_by_pytorch([m.double() for m in maps], [g.double() for g in grids], weights.double(), align_corners)


def summed(given: Operands, align_corners: bool = False) -> float:
    """The largest sum of magnitudes: what rounding is relative to where few results cancel."""
    maps, grids, weights = given
    return exact(([each.abs() for each in maps], grids, weights), align_corners).max().item()


@pytest.fixture
def pytorch_calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Filled where grid_sample computes after all."""
    calls: list[object] = []
    own = weighted_samples.samples_by_pytorch
    monkeypatch.setattr(weighted_samples, "samples_by_pytorch", lambda *args: calls.append(args) or own(*args))
    return calls


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(2, 9), st.integers(2, 9)), min_size=1, max_size=3),
    points=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    shape=st.tuples(st.integers(1, 4), st.sampled_from((1, 3, 8, 16, 33)), st.integers(1, 40)),
    side_by_side=st.booleans(),
    align_corners=st.booleans(),
    block=st.sampled_from((1, 7, 64, weighted_samples._BLOCK)),
    seed=st.integers(0, 99),
)
@example([(8, 6), (6, 3), (8, 6)], [2, 5, 2], (1, 1, 1), False, False, 1, 43)  # one result, which cancels
def test_any_sizes(
    sizes: list[tuple[int, int]],
    points: list[int],
    shape: tuple[int, int, int],
    side_by_side: bool,
    align_corners: bool,
    block: int,
    seed: int,
) -> None:
    given = operands(sizes, points[: len(sizes)], shape, side_by_side=side_by_side, seed=seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weighted_samples, "_BLOCK", block)
        actual = by_bags(given, align_corners)
    assert_close(actual, exact(given, align_corners), k=16 * sum(points), scale=summed(given, align_corners))


@pytest.mark.parametrize("align_corners", [False, True])
def test_at_pixels_borders_and_far_away(align_corners: bool, pytorch_calls: list[object]) -> None:
    given = operands([(4, 5)], [1], (1, 3, 1), seed=0)
    for x in (-1e30, -3.0, -1.2, -1.0, -0.8, 0.0, 0.5, 0.8, 1.0, 1.2, 3.0, 1e30):
        for y in (-1e30, -1.25, -1.0, -0.75, 0.25, 1.0, 1.25, 1e30):
            given[1][0].copy_(torch.tensor([x, y]))
            assert_close(by_bags(given, align_corners), exact(given, align_corners), k=16)
    assert not pytorch_calls


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", ["map", "grid", "weights"])
def test_numbers_that_are_not_finite_spread_as_in_eager(bad: float, place: str) -> None:
    given = operands([(4, 5), (3, 3)], [2, 1], (2, 3, 7), seed=1)
    maps, grids, weights = given
    {"map": maps[0][1, :, 3, 4], "grid": grids[0][0, 2, 1], "weights": weights[1, 0, 5]}[place].fill_(bad)
    torch.testing.assert_close(by_bags(given), samples_by_pytorch(maps, grids, weights, False), equal_nan=True)


def test_a_pixel_that_no_sample_is_near_does_not_count(pytorch_calls: list[object]) -> None:
    given = operands([(4, 5)], [1], (1, 3, 6), seed=2)
    given[0][0][:, :, 0, 0] = math.inf
    given[1][0].fill_(1.0)  # at the other corner
    assert by_bags(given).isfinite().all() and not pytorch_calls
    given[1][0].fill_(-1.0 - 1 / 4)  # beyond the border: the pixel's weight is none
    expected = samples_by_pytorch(*given, False)
    torch.testing.assert_close(by_bags(given), expected, equal_nan=True)


def test_grids_and_weights_in_any_strides() -> None:
    maps, grids, weights = operands([(4, 5), (6, 2)], [3, 2], (2, 4, 9), side_by_side=False, seed=3)
    grids = [grid.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for grid in grids]
    given = (maps, grids, weights.transpose(2, 3).contiguous().transpose(2, 3))
    assert_close(by_bags(given), exact(given), k=80)
