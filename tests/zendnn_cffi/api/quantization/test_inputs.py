"""Calibration data stay as they are, and each look at an input finds what was given."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from tests.support.lowering import noise
from zendnn_cffi.api.quantization.inputs import Calls, copied, kept_calls, writes_to_inputs
from zendnn_cffi.api.quantization.pt2e import exported_graph
from zendnn_cffi.api.quantization_report import sqnr_db


class Normalizes(nn.Module):
    """Writes to its input first, or to a view of it, or to nothing."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.conv, self.head = how, nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in place":
            x.sub_(0.5).div_(0.25)
        elif self.how == "by a view":
            x = x.view(x.shape).sub_(0.5).div_(0.25)
        elif self.how == "a part":  # nobody reads what this returns
            x = x.clone()
            x[:, 1].mul_(3.0)
        else:
            x = x.sub(0.5).div_(0.25)
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


@pytest.mark.parametrize(
    ("how", "options"),
    [("in place", {}), ("in place", {"budget": 25.0}), ("by a view", {}), ("a part", {}), ("in new memory", {})],
)
def test_data_that_forward_writes_to(how: str, options: dict[str, Any]) -> None:
    model = Normalizes(how).eval()
    data = [noise(2, 3, 16, 16, seed=seed) for seed in range(3)]
    before = [x.clone() for x in data]
    found = zendnn_cffi.quantize(model, data, tune="off", **options)
    assert all(map(torch.equal, data, before))
    with torch.no_grad():
        near = [sqnr_db(model(x.clone()), found.module(x.clone())) for x in before]
    assert min(near) > 25 and found.report.sqnr_db == pytest.approx(near[0], abs=1.0)
    assert any(row.computes_in == "int8" for row in found.report.layers)


@pytest.mark.parametrize(("how", "writes"), [("in place", True), ("by a view", True), ("in new memory", False)])
def test_inputs_are_copied_where_they_are_written_to(how: str, writes: bool) -> None:
    given = [((noise(2, 3, 16, 16),), {}) for _ in range(4)]
    assert writes_to_inputs(exported_graph(Normalizes(how).eval(), given[0])) is writes
    calls = Calls(given, writes)
    for mine in (calls[1], [*calls][1], calls[1::2][0]):
        assert (mine is given[1]) is not writes
        assert torch.equal(mine[0][0], given[1][0][0])


def test_copies_share_memory_as_the_originals_do() -> None:
    x, y = noise(4, 8), noise(2)
    (one, part, again, other), kwargs = copied(((x, x[1:], x, y), {"flag": 3}))
    assert kwargs == {"flag": 3} and torch.equal(other, y)
    part.zero_()
    assert one is again and not one[1:].any() and torch.equal(one[0], x[0]) and x[1:].any()


def test_model_that_export_cannot_follow_leaves_the_data() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.add_(1), object()

    x = noise(2, 3)
    before = x.clone()
    with pytest.raises(ValueError, match="returns a object"):
        zendnn_cffi.quantize(Odd().eval(), [x])
    assert torch.equal(x, before)


INPUTS = [scale * noise(4, 24, seed=seed) for seed, scale in enumerate((10.0, 5.0, 0.01))]


def reused() -> Iterator[torch.Tensor]:
    buffer = torch.empty(4, 24)
    for x in INPUTS:
        yield buffer.copy_(x)


@pytest.mark.parametrize("calibration", [reused, lambda: iter(INPUTS), lambda: INPUTS])
def test_generator_that_reuses_its_buffer(calibration: Callable[[], Iterable[torch.Tensor]]) -> None:
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 8)).eval()
    module, report, _ = zendnn_cffi.quantize(model, calibration(), tune="off", compare=False)
    with torch.no_grad():
        assert sqnr_db(model(INPUTS[0]), module(INPUTS[0])) == pytest.approx(report.sqnr_db, abs=1.0)
    assert report.sqnr_db > 30


def test_inputs_beyond_those_kept_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zendnn_cffi.api.quantization.inputs._MOST_KEPT", 2)
    given, alive = 0, list[int]()

    def data() -> Iterator[torch.Tensor]:
        nonlocal given
        held = set[int]()
        for number in range(12):
            x = noise(4, 24, seed=number)
            held.add(number)
            weakref.finalize(x, held.discard, number)
            given += 1
            yield x
            del x
            alive.append(len(held))

    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 8)).eval()
    zendnn_cffi.quantize(model, data(), tune="off", compare=False)
    assert given == 12 and max(alive) <= 4


def test_kept_calls_of_a_list_are_those_given() -> None:
    calls = [((x,), {}) for x in INPUTS]
    assert all(mine is call for mine, call in zip(kept_calls(iter(calls), copies=False), calls, strict=True))
