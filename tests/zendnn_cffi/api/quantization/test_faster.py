"""Which layers compute in integers where nothing but time decides: the least sum, measured before it is kept."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zendnn_cffi
from tests.support.lowering import noise
from tests.support.mixed_precision import Concatenated, Encoder, Residual, called, calls_of_noise, prepared
from tests.support.quantized import ran
from zendnn_cffi.api.quantization import attempt
from zendnn_cffi.api.quantization.fake_quantized import FakeQuantized
from zendnn_cffi.api.quantization.faster import faster_in_integers, links_between
from zendnn_cffi.api.quantization.gains import LayerTimes
from zendnn_cffi.api.quantization_report import sqnr_db

MILLISECONDS = st.integers(1, 40).map(lambda n: n / 100)


def times(floats: Mapping[str, float], integers: Mapping[str, float]) -> LayerTimes:
    return LayerTimes(floats, integers, sum(floats.values()), sum(integers.values()))


def conversion_ms(numbers: int) -> float:
    return 0.002 + 5 * numbers / 10e6


@given(st.data())
def test_the_choice_takes_least(data: st.DataObject) -> None:
    names = [f"layer_{i}" for i in range(data.draw(st.integers(1, 7)))]
    found = times(*({name: data.draw(MILLISECONDS) for name in names} for _ in range(2)))
    links = {
        (names[data.draw(st.integers(0, i - 1))], names[i]): data.draw(st.integers(0, 300_000))
        for i in range(1, len(names))
    }

    def cost(chosen: frozenset[str]) -> float:
        own = sum((found.integers if name in chosen else found.floats)[name] for name in names)
        return own + sum(conversion_ms(size) for (a, b), size in links.items() if (a in chosen) != (b in chosen))

    every = [frozenset(c) for n in range(len(names) + 1) for c in itertools.combinations(names, n)]
    least, whole = min(map(cost, every)), cost(frozenset(names))
    chosen = faster_in_integers(names, found, links)
    assert chosen == [name for name in names if name in chosen]
    if whole - least > 0.03 * found.int8_ms + 1e-9:
        assert cost(frozenset(chosen)) == pytest.approx(least)
    elif whole - least < 0.03 * found.int8_ms - 1e-9:
        assert chosen == names


def test_layers_without_times_are_not_told_apart() -> None:
    unknown = LayerTimes({}, {}, 0.0, 0.0)
    assert faster_in_integers(["a", "b"], unknown, {("a", "b"): 100}) == ["a", "b"]
    assert faster_in_integers(["a", "b"], times({"a": 1.0}, {"a": 2.0}), {("a", "b"): 100}) == []  # b goes with a
    assert unknown.gain_ms("a") == 0.0


def test_links_lead_to_the_last_layer_before() -> None:
    for model, shape, expected in (
        (Residual(), (2, 3, 14, 14), {("conv2d", "conv2d_1"): 2 * 8 * 144, ("conv2d_1", "linear"): 2 * 8 * 36}),
        (
            Concatenated(),
            (2, 3, 10, 10),
            {
                ("conv2d_1", "conv2d_2"): 2 * 4 * 64,
                ("conv2d_2", "conv2d_3"): 2 * 8 * 16,
            },
        ),
        (
            Encoder(),
            (2, 4, 16),
            {
                ("linear_1", "linear_2"): 2 * 4 * 16,
                ("linear_2", "linear_3"): 2 * 4 * 16,
            },
        ),
    ):
        calls = calls_of_noise(2, *shape)
        fake = FakeQuantized(prepared(model.eval(), calls), calls)
        assert links_between(fake.module, fake.layers, calls[0]) == expected


class Blocks(nn.Module):
    """Three convolutions in a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


FLOATS = {"conv2d": 1.0, "conv2d_1": 1.0, "conv2d_2": 1.0}
SLOW_FIRST = {"conv2d": 5.0, "conv2d_1": 0.2, "conv2d_2": 0.2}


@pytest.fixture
def slow_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that say that integers slow the first layer down, and speed up the others."""
    monkeypatch.setattr(attempt, "layer_times", lambda *args: times(FLOATS, SLOW_FIRST))


@pytest.mark.parametrize(
    ("compared", "in_integers"),
    (
        ([(5.4, 1.4), (3.0, 1.4)], {"b", "c"}),
        ([(1.4, 1.4), (3.0, 1.4)], {"a", "b", "c"}),  # no faster than all of them: these stay
        ([(5.4, 4.0), (3.0, 4.0)], set()),  # the float model beats both
    ),
    ids=("some", "all", "none"),
)
def test_measured_times_decide(
    compared: list[tuple[float, float]],
    in_integers: set[str],
    slow_first: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = iter([*compared, compared[-1]])
    monkeypatch.setattr(attempt, "compared_ms", lambda *args: next(answers))
    model, data = Blocks().eval(), [noise(1, 3, 34, 34, seed=seed) for seed in range(3)]
    with caplog.at_level(logging.WARNING, "zendnn_cffi.quantize"):
        module, report, converted = zendnn_cffi.quantize(model, data)
    assert {row.module for row in report.layers if not row.why} == in_integers
    assert {row.why for row in report.layers if row.module not in in_integers} <= {"faster in float"}
    assert report.chosen == len(in_integers) and [row.gain_ms for row in report.layers] == pytest.approx([-4, 0.8, 0.8])
    rounded = {str(node.target) for node in converted.graph.nodes if "quantize_per_tensor" in str(node.target)}
    assert bool(rounded) == bool(in_integers)
    with torch.no_grad():
        assert sqnr_db(called(converted, ((data[0],), {})), module(data[0])) > 40
        assert sqnr_db(model(data[0]), module(data[0])) > (15 if in_integers else 100)
    integers = {name for name, dtype, _ in ran(module) if dtype in (torch.uint8, torch.int8)}
    assert bool(integers) == bool(in_integers)
    assert ("not faster so" in caplog.text) == (not in_integers) == ("it would not be faster" in str(report))


@pytest.mark.parametrize("options", ({"tune": "off"}, {"compare": False}), ids=str)
def test_all_layers_are_quantized_where_nothing_is_measured(options: dict[str, object], slow_first: None) -> None:
    data = [noise(1, 3, 34, 34)]
    _, report, _ = zendnn_cffi.quantize(Blocks().eval(), data, **options)  # type: ignore[arg-type]
    assert report.chosen is None and {row.gain_ms for row in report.layers} == {None} and len(report.layers) == 3


def test_limits_are_kept_by_layers_that_are_faster(slow_first: None) -> None:
    data = [noise(1, 3, 34, 34, seed=seed) for seed in range(3)]
    module, report, _ = zendnn_cffi.quantize(Blocks().eval(), data, budget=5.0)
    why = {row.module: (row.why, row.alone_db) for row in report.layers}
    assert why["a"] == ("faster in float", None) and {why[name][0] for name in "bc"} == {"its error is worth its gain"}
    assert report.chosen == 2 and report.verified_db and report.verified_db > 5
    assert [point.layers for point in report.frontier][0] == 2
    assert report.frontier[0].time_ms == pytest.approx(1.4) and report.frontier[-1].time_ms == pytest.approx(3.0)
    assert "faster in float" in str(report)


def test_limits_where_no_layer_is_faster(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(attempt, "layer_times", lambda *args: times(FLOATS, dict.fromkeys(FLOATS, 5.0)))
    with caplog.at_level(logging.WARNING, "zendnn_cffi.quantize"):
        _, report, _ = zendnn_cffi.quantize(Blocks().eval(), [noise(1, 3, 34, 34)], budget=5.0)
    assert report.chosen == 0 and "it would not be faster" in str(report) and "it is not faster so" in caplog.text


def test_nothing_is_chosen_where_no_layer_can_be_quantized() -> None:
    _, report, _ = zendnn_cffi.quantize(nn.Tanh().eval(), [noise(4, 4)])
    assert report.layers == () and report.chosen is None
