"""Bias correction and SmoothQuant: the float model stays, the quantized one comes nearer to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zendnn_cffi
from tests.support.lowering import noise
from tests.support.mixed_precision import Encoder, Residual, called, calls_of_noise, prepared
from zendnn_cffi.api.quantization import correct_bias
from zendnn_cffi.api.quantization.correct_bias import bias_corrections, correct
from zendnn_cffi.api.quantization.fake_quantized import FakeQuantized
from zendnn_cffi.api.quantization.layers import kind
from zendnn_cffi.api.quantization.pt2e import exported_graph, torchao
from zendnn_cffi.api.quantization.smooth import smooth_linears
from zendnn_cffi.api.quantization_report import sqnr_db


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("make", (lambda bias: nn.Linear(16, 5, bias=bias), lambda bias: nn.Conv2d(3, 5, 3, bias=bias)))
def test_the_mean_of_a_layer_is_the_float_one(make: object, bias: bool) -> None:
    torch.manual_seed(0)
    layer = make(bias).eval()  # type: ignore[operator]
    calls = calls_of_noise(3, 4, 16) if isinstance(layer, nn.Linear) else calls_of_noise(3, 2, 3, 9, 9)
    fake = FakeQuantized(prepared(nn.Sequential(layer).eval(), calls), calls)
    dims = [dim for dim in range(called(layer, calls[0]).dim()) if dim != 1]

    def shift() -> torch.Tensor:
        fake.switch(fake.layers)
        return sum(called(fake.module, call) - called(layer, call) for call in calls).mean(dims)  # type: ignore[union-attr]

    before = shift()
    (correction,) = (biases := bias_corrections(fake)).values()
    assert correction.shape == (5,) and correction.dtype == torch.float32
    fake.shift(biases)
    assert shift().abs().max() < 1e-5 < before.abs().max()


@pytest.mark.needs("vnni")
def test_corrections_add_up_to_a_nearer_network() -> None:
    torch.manual_seed(1)
    calls = calls_of_noise(6, 4, 3, 12, 12)
    fake = FakeQuantized(prepared(Residual().eval(), calls), calls)
    before = fake.noise(fake.layers)
    fake.shift(bias_corrections(fake))
    assert fake.noise(fake.layers) < before and fake.noise(()) == 0


class Clipped(nn.Module):
    """Two layers; the second one reads a token that is clipped, and a normalization hides it from the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(torch.relu(self.first(x))))


def test_corrections_that_lose_are_dropped() -> None:
    torch.manual_seed(0)
    model, usual = Clipped().eval(), calls_of_noise(4, 1, 40, 16)
    graph = prepared(model, usual)  # ranges of usual tokens
    extreme = []
    for (x,), _ in usual:
        x = x.clone()
        x[:, 0] *= 400
        extreme.append(((x,), {}))
    fake = FakeQuantized(graph, extreme)
    before, biases = fake.noise(fake.layers), bias_corrections(fake)
    kept = correct(fake)
    assert set(kept) < set(biases) and fake.noise(fake.layers) <= before
    fake = FakeQuantized(graph, extreme)
    fake.shift(biases)
    assert fake.noise(fake.layers) > before


def test_a_correction_that_loses_does_not_take_all_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many layers: each alone would take hundreds of calls of the model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(40))).eval()
    calls = calls_of_noise(2, 5, 16)
    fake = FakeQuantized(prepared(model, calls), calls)
    biases = bias_corrections(fake)
    wrong = list(biases)[-2]
    biases[wrong] = biases[wrong] + 1.0
    monkeypatch.setattr(correct_bias, "bias_corrections", lambda fake: biases)
    looks: list[float] = []
    noise_of = fake.noise_of
    monkeypatch.setattr(fake, "noise_of", lambda *args: looks.append(noise_of(*args)) or looks[-1])  # type: ignore[func-returns-value]
    kept = correct(fake)
    assert wrong not in kept and len(kept) > 10 and len(looks) <= 64
    assert fake.noise(fake.layers) == min(looks) < looks[0]
    assert all(torch.equal(kept[name], biases[name]) for name in kept)


def test_smoothing_is_exact_in_float_and_nearer_in_integers() -> None:
    torch.manual_seed(0)
    model, calls = Encoder().eval(), calls_of_noise(4, 3, 7, 16)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    noises = []
    for smooth in (False, True):
        graph = exported_graph(model, calls[0])
        products = sum(kind(node) == "mul" for node in graph.graph.nodes)
        if smooth:
            assert smooth_linears(graph, calls) == ["linear", "linear_1", "linear_2"]
            assert sum(kind(node) == "mul" for node in graph.graph.nodes) == products + 1  # pre is folded, post is not
            assert sqnr_db(called(model, calls[0]), called(graph, calls[0])) > 110
        graph = torchao().prepare(graph, False)
        with torch.no_grad():
            for args, _ in calls:
                graph(*args)
        fake = FakeQuantized(graph, calls)
        noises.append(fake.noise(fake.layers))
    assert noises[1] < noises[0] / 2
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_nothing_is_smoothed_without_normalizations() -> None:
    calls = calls_of_noise(1, 4, 16)
    graph = exported_graph(nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 8)).eval(), calls[0])
    code = graph.code
    assert smooth_linears(graph, calls) == [] and graph.code == code


def test_calls_without_rows_say_nothing_of_channels() -> None:
    """Detectors whose later layers see no box in a calibration image."""
    model, calls = Encoder().eval(), calls_of_noise(2, 3, 7, 16)
    empty = [((args[0][:, :0],), kwargs) for args, kwargs in calls]
    graph = exported_graph(model, calls[0])
    assert smooth_linears(graph, [*empty, *calls]) == ["linear", "linear_1", "linear_2"]
    assert sqnr_db(called(model, calls[0]), called(graph, calls[0])) > 110
    graph = exported_graph(model, calls[0])
    code = graph.code
    assert smooth_linears(graph, empty) == [] and graph.code == code


@pytest.mark.parametrize("bias", (False, True), ids=("no bias", "bias"))
def test_what_is_corrected_stays_a_parameter(bias: bool) -> None:
    """Functions that tell accuracy ask next(module.parameters()) for the device; there was none."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=bias), nn.BatchNorm2d(8), nn.ReLU()).eval()
    asked = []

    def accuracy(module: nn.Module) -> float:
        parameter = next(module.parameters())
        asked.append((parameter.device.type, parameter.dtype))
        return 1.0

    inputs = [noise(2, 3, 8, 8)]
    found = zendnn_cffi.quantize(model, inputs, accuracy=accuracy, max_drop=0.0, tune="off", compare=False)
    assert set(asked) == {("cpu", torch.float32)}
    for module in (found.module, found.converted):
        assert [parameter.requires_grad for parameter in module.parameters()] == [False]
