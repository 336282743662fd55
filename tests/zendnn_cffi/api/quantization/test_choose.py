"""The choice of layers: within the limits, the layer of large error is left out; else the float model."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zendnn_cffi
from fx_passes.report.records import PrimitiveTime
from tests.support.lowering import noise
from tests.support.mixed_precision import Outlier, calls_of_noise, prepared
from tests.support.quantized import ran
from zendnn_cffi.api.quantization import attempt
from zendnn_cffi.api.quantization.checks import as_limit
from zendnn_cffi.api.quantization.choose import Limits, Search
from zendnn_cffi.api.quantization.fake_quantized import FakeQuantized
from zendnn_cffi.api.quantization.gains import LayerTimes, layer_times, shared_out
from zendnn_cffi.api.quantization_report import sqnr_db

GAINS = {"linear": 0.3, "linear_1": 0.3, "linear_2": 0.2}


@pytest.fixture
def fake() -> FakeQuantized:
    torch.manual_seed(0)
    calls = calls_of_noise(4, 8, 16)
    return FakeQuantized(prepared(Outlier().eval(), calls), calls)


@pytest.fixture
def gains(monkeypatch: pytest.MonkeyPatch) -> None:
    integers = dict.fromkeys(GAINS, 0.1)
    found = LayerTimes({name: 0.1 + gain for name, gain in GAINS.items()}, integers, 1.0, 0.4)
    monkeypatch.setattr(attempt, "layer_times", lambda *args: found)


def db(noise_share: float) -> float:
    return -10 * math.log10(noise_share)


def test_each_budget_is_kept(fake: FakeQuantized) -> None:
    errors = {name: db(fake.noise([name])) for name in fake.layers}
    assert errors["linear_1"] < 20 < 30 < min(errors["linear"], errors["linear_2"])
    chosen = {}
    for budget in (0.0, 25.0, errors["linear_2"] - 0.1, 200.0):
        chosen[budget] = Search(fake, GAINS, Limits(budget_db=budget)).choose()
        assert not chosen[budget] or db(fake.noise(chosen[budget])) >= budget
    assert chosen[0.0] == fake.layers and chosen[25.0] == ["linear", "linear_2"]
    assert len(chosen[errors["linear_2"] - 0.1]) <= 1 and chosen[200.0] == []


class Counting(nn.Module):
    """Judged right from its buffer as it was before the first call alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.layer(x) * self.calls


def test_accuracy_is_that_of_the_state_before_calls() -> None:
    found = []

    def accuracy(module: Any) -> float:
        with torch.no_grad():
            y, z = module(torch.ones(1, 16)), module(torch.ones(1, 16))
        found.append(float((z / y).mean()))
        return -abs(found[-1] - 2.0)

    calls = [args for args, _ in calls_of_noise(4, 8, 16)]
    result = zendnn_cffi.quantize(Counting().eval(), calls, accuracy=accuracy, max_drop=0.01, tune="off", compare=False)
    assert found == pytest.approx([2.0] * len(found)) and result.report.chosen == 1


class Labels(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).argmax(-1)


class Zeros(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(x).tanh() - 1)


@pytest.mark.parametrize(
    ("model", "message"), [(Labels, "the model returns none: give accuracy and max_drop"), (Zeros, "returns zeros")]
)
def test_a_budget_needs_outputs_that_tell_of_noise(model: type[nn.Linear], message: str) -> None:
    data = [noise(4, 16, seed=seed) for seed in range(3)]
    with pytest.raises(ValueError, match=message):
        zendnn_cffi.quantize(model(16, 8).eval(), data, budget=20.0, tune="off", compare=False)
    limits: dict[str, Any] = {"accuracy": lambda module: 1.0, "max_drop": 0.0}
    _, report, _ = zendnn_cffi.quantize(model(16, 8).eval(), data, tune="off", compare=False, **limits)
    assert report.chosen == 1


def test_noise_against_zeros_is_infinite(fake: FakeQuantized, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = [[torch.zeros_like(x) for x in outputs] for outputs in fake.expected()]
    monkeypatch.setattr(fake, "expected", lambda: zeros)
    assert fake.noise([]) == math.inf and not fake.has_signal()
    assert fake.noise_of(lambda *args: zeros[0]) == 0.0


def test_accuracy_decides(fake: FakeQuantized) -> None:
    expected = fake.expected()

    def accuracy(module: Any) -> float:
        with torch.no_grad():
            return min(sqnr_db(y[0], module(*args)) for (args, _), y in zip(fake.calls, expected, strict=True))

    search = Search(fake, GAINS, Limits(accuracy=accuracy, max_drop=1000.0 - 25.0, float_accuracy=1000.0))
    assert search.choose() == ["linear", "linear_2"]
    for bad in (math.nan, 0.0):
        limits = Limits(accuracy=lambda module, bad=bad: bad, max_drop=0.5, float_accuracy=1.0)  # type: ignore[misc]
        assert Search(fake, GAINS, limits).choose() == []


def test_smaller_drops_the_worst_error_for_its_gain(fake: FakeQuantized) -> None:
    search = Search(fake, GAINS, Limits(budget_db=30.0))
    assert search.smaller(fake.layers) == ["linear", "linear_2"]
    assert search.smaller(["linear"]) == [] and search.smaller(fake.layers, 1e-9) == []
    points = search.frontier(1.0, 0.4)
    assert points[0][2] == 3 and points[-1] == (1.0, 0.0, 0)
    assert points[0][0] == pytest.approx(0.4)


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("dynamic", (False, True))
def test_a_budget(gains: None, dynamic: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = Outlier().eval(), [noise(8, 16, seed=seed) for seed in range(4)]
    module, report, converted = zendnn_cffi.quantize(model, data, budget=25.0, dynamic=dynamic, tune="off")
    where = {row.module: row.computes_in for row in report.layers}
    assert (where["first"], where["last"]) == ("int8", "int8") and where["middle"] != "int8"
    assert report.verified_db and report.verified_db >= 25.0 and report.chosen == 2
    with torch.no_grad():
        both = [torch.cat([each(x) for x in data]) for each in (model, module, converted)]
    assert sqnr_db(both[0], both[1]) == pytest.approx(report.verified_db, abs=1e-3)
    assert sqnr_db(both[1], both[2]) > 30
    assert any(dtype in (torch.uint8, torch.int8) for _, dtype, _ in ran(module))
    text = str(report)
    assert "25.0 asked for" in text and "too large for its gain" in text and "alone dB" in text
    assert [point.layers for point in report.frontier][0] == 3 and report.frontier[-1].layers == 0
    assert report.draw(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    torch.export.save(torch.export.export(converted, (data[0],)), tmp_path / "m.pt2")


def test_no_layer_keeps_to_the_budget(gains: None) -> None:
    model, data = Outlier().eval(), [noise(8, 16)]
    module, report, converted = zendnn_cffi.quantize(model, data, budget=90.0, tune="off", compare=False)
    assert report.chosen == 0 and report.verified_db and report.verified_db > 90
    assert not any("quantize" in node.name for node in converted.graph.nodes)
    assert "nothing else keeps to the limits" in str(report)
    assert {row.computes_in for row in report.layers} <= {"float32", "float", "plain PyTorch"}


def test_bfloat16_alone_is_outside_of_the_budget(gains: None) -> None:
    data = [noise(8, 16)]
    _, report, _ = zendnn_cffi.quantize(
        Outlier().eval(), data, budget=90.0, dtype=torch.bfloat16, tune="off", compare=False
    )
    assert report.chosen == 0 and report.verified_db and report.verified_db > 90


def test_kernels_that_round_otherwise_lose_layers(gains: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeQuantized, "noise_of", lambda self, module, calls=None: 0.5)  # whatever is compiled
    monkeypatch.setattr(FakeQuantized, "noise", lambda self, layers, calls=None: 1e-4 * len(layers))
    _, report, _ = zendnn_cffi.quantize(Outlier().eval(), [noise(8, 16)], budget=20.0, tune="off", compare=False)
    assert report.chosen == 0


def test_accuracy_of_the_module(gains: None) -> None:
    torch.manual_seed(0)
    model, x = Outlier().eval(), noise(64, 16)
    with torch.no_grad():
        expected = model(x)

    def accuracy(module: Any) -> float:
        with torch.no_grad():
            return -float((module(x) - expected).abs().max() / expected.abs().max())

    _, report, _ = zendnn_cffi.quantize(model, [x], accuracy=accuracy, max_drop=0.05, tune="off", compare=False)
    assert report.chosen == 2 and report.accuracies and report.accuracies[0] == 0.0
    assert -0.05 <= report.accuracies[1] < 0 and "accuracy" in str(report)


@pytest.mark.parametrize(
    "options, error, message",
    (
        ({"budget": "30"}, TypeError, "budget must be a number"),
        ({"budget": math.nan}, ValueError, "budget is not a number"),
        ({"budget": True}, TypeError, "budget must be a number"),
        ({"max_drop": 1j}, TypeError, "max_drop must be a number"),
        pytest.param({"budget": 10**400}, ValueError, "budget is too large", id="beyond float64"),
        ({"accuracy": 0.9, "max_drop": 0.1}, TypeError, "accuracy must be a function"),
        ({"accuracy": lambda module: 1.0}, ValueError, "accuracy and max_drop go together"),
        ({"max_drop": 0.1}, ValueError, "accuracy and max_drop go together"),
        ({"accuracy": lambda module: math.nan, "max_drop": 0.1}, ValueError, "accuracy of the float model"),
        ({"accuracy": lambda module: 1.0, "max_drop": -1}, ValueError, "max_drop must be at least 0"),
    ),
)
def test_bad_limits(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        zendnn_cffi.quantize(nn.Linear(3, 3).eval(), [torch.ones(1, 3)], **options)


@pytest.mark.parametrize("given", (np.float32(0.5), np.int64(2), Fraction(1, 2), 10**9, None), ids=repr)
def test_limits_are_any_real_numbers(given: Any) -> None:
    found = as_limit(given, "budget")
    assert found is None if given is None else type(found) is float and found == given


def test_a_budget_below_all_ratios() -> None:
    assert Limits(budget_db=-1e9).noise > 1e200 and Limits(budget_db=-math.inf).noise > 1e200


def test_times_of_joined_layers_are_shared() -> None:
    def record(name: str, milliseconds: float, flops: int = 1, kind: str = "matmul") -> PrimitiveTime:
        return PrimitiveTime("r", name, kind, "brg", int(1e6 * milliseconds), flops)

    records = [record("a", 2), record("new", 3), record("other", 9), record("b", 9, 1, "reorder")]
    found = shared_out(records, {"a": 1, "b": 1, "c": 1, "d": 2}, {"a", "b", "c", "d", "other"})
    assert found == {"a": 2.0, "b": 9.0, "c": 4.0, "d": 8.0}  # "other" is no layer, and behind the joined ones


def test_what_runs_between_layers_is_counted_with_them() -> None:
    def record(name: str, milliseconds: float, flops: int = 0) -> PrimitiveTime:
        return PrimitiveTime("r", name, "matmul" if flops else "binary", "brg", int(1e6 * milliseconds), flops)

    records = [record("x for a", 1), record("ahead", 2), record("a", 4, 1), record("relu", 8), record("relu for b", 16)]
    records += [record("b", 32, 1), record("sum", 64)]
    assert shared_out(records, {"a": 1, "b": 1}, {"a", "b", "relu", "sum"}) == {"a": 15.0, "b": 112.0}


def test_gains_of_real_modules() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), noise(8, 64)
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    found = layer_times(fast, fast, ((x,), {}), {"_0": 1, "nothing": 1}, {"_0", "_1", "_2"})
    assert found.floats.keys() == found.integers.keys() == {"_0"} and found.float_ms > 0 < found.int8_ms
    assert all(time_ms > 0 for time_ms in (*found.floats.values(), *found.integers.values()))
    assert layer_times(model, model, ((x,), {}), {"_0": 1}, ()) == LayerTimes({}, {}, 0.0, 0.0)
