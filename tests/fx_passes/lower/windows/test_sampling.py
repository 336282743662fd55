"""Deformable attention's samples in regions: by bags of rows where that is faster, against float64."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from tests.fx_passes.fuse.test_weighted_samples import HEADS, POINTS, SIZES, WIDTH, Deformable, inputs, joined, stacked
from tests.support.lowering import noise
from tests.support.made_up_times import prefer
from tests.tolerance import assert_close

K = 64 * HEADS * WIDTH * POINTS * len(SIZES)


class Attention(nn.Module):
    """Deformable attention as a layer has it: what is sampled, where, and how much of it come from linear layers."""

    def __init__(self, write: Any = stacked) -> None:
        super().__init__()
        torch.manual_seed(0)
        width, samples = HEADS * WIDTH, HEADS * len(SIZES) * POINTS
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.offsets, self.shares = nn.Linear(width, 2 * samples), nn.Linear(width, samples)
        self.sample = Deformable(write)
        self.eval()

    def forward(self, x: Tensor, queries: Tensor) -> Any:
        batch, count, _ = queries.shape
        value = self.value(x).view(batch, -1, HEADS, WIDTH)
        at = self.offsets(queries).view(batch, count, HEADS, len(SIZES), POINTS, 2).sigmoid()
        shares = self.shares(queries).view(batch, count, HEADS, -1).softmax(-1)
        return self.out(self.sample(value, at, shares.view(batch, count, HEADS, len(SIZES), POINTS)))


def given(batch: int, queries: int = 9) -> tuple[Tensor, Tensor]:
    rows = sum(h * w for h, w in SIZES)
    return noise(batch, rows, HEADS * WIDTH), noise(batch, queries, HEADS * WIDTH, seed=3)


def implementation(fast: Any) -> str:
    (name,) = {n.implementation for n in zendnn_cffi.explain(fast).nodes if "weighted_samples" in n.name}
    return name


@pytest.fixture
def by_bags(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    prefer(monkeypatch, lambda candidate: candidate.implementation == "torch:bags")


@pytest.mark.parametrize("write", [stacked, joined])
@pytest.mark.parametrize("batch", [1, 3])
def test_layers(batch: int, write: Any, by_bags: None) -> None:
    model, operands = Attention(write), given(batch)
    fast = zendnn_cffi.optimize(model, operands, tune="full")
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(*(each.double() for each in operands))
        for _ in range(2):
            found = fast(*operands)
            assert_close(found, expected, k=K)
            assert found.stride() == expected.stride()
    assert implementation(fast) == "torch:bags"


def test_bfloat16_regions_sample_in_float32(by_bags: None) -> None:
    model, operands = Attention(), given(2)
    fast = zendnn_cffi.optimize(model, operands, tune="full", dtype=torch.bfloat16)
    with torch.no_grad():
        found, expected = fast(*operands), copy.deepcopy(model).double()(*(each.double() for each in operands))
        eager = copy.deepcopy(model).bfloat16()(*(each.bfloat16() for each in operands))
    assert implementation(fast) == "torch:bags"
    assert (found - expected).abs().max() <= 2 * (eager - expected).abs().max()


def test_alone_with_infinite_numbers(by_bags: None) -> None:
    model, operands = Deformable(stacked), list(inputs())
    operands[0][1, 3] = torch.inf
    fast = zendnn_cffi.optimize(model, tuple(operands), tune="full")
    with torch.no_grad():
        torch.testing.assert_close(fast(*operands), model(*operands), equal_nan=True)
    assert implementation(fast) == "torch:bags"


def test_without_measuring_many_queries_take_bags() -> None:
    model, operands = Attention(), given(1, 2000)
    fast = zendnn_cffi.optimize(model, operands, tune="off")
    with torch.no_grad():
        assert_close(fast(*operands), copy.deepcopy(model).double()(*(each.double() for each in operands)), k=K)
    assert implementation(fast) == "torch:bags"


def test_maps_of_one_line_are_sampled_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fx_passes.fuse.test_weighted_samples.SIZES", ((1, 26), (3, 2)))
    model, operands = Attention(), (noise(1, 32, HEADS * WIDTH), noise(1, 9, HEADS * WIDTH, seed=3))
    fast = zendnn_cffi.optimize(model, operands, tune="off")
    with torch.no_grad():
        assert_close(fast(*operands), copy.deepcopy(model).double()(*(each.double() for each in operands)), k=K)
    assert implementation(fast) == "torch:grid_sample"


def test_saved_and_loaded(tmp_path: Path, by_bags: None) -> None:
    model, operands = Attention(), given(1)
    fast = zendnn_cffi.optimize(model, operands, tune="full")
    with torch.no_grad():
        expected = fast(*operands)
        zendnn_cffi.save(fast, tmp_path / "model.zen")
        again = zendnn_cffi.load(tmp_path / "model.zen")
        assert torch.equal(again(*operands), expected)
    assert implementation(again) == "torch:bags"
