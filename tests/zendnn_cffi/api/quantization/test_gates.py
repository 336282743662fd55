"""Squeeze and excitation: the product reads the observer that the average reads, and the kernels integers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zendnn_cffi
from tests.support.lowering import noise
from tests.support.mixed_precision import called
from tests.support.quantized import ran, reorders
from zendnn_cffi.api.quantization.fake_quantized import FakeQuantized
from zendnn_cffi.api.quantization.gates import share_observers
from zendnn_cffi.api.quantization.layers import Call, kind, observer_of
from zendnn_cffi.api.quantization.pt2e import calibrate, exported_graph, torchao


class Excited(nn.Module):
    """A squeeze-and-excitation block between two convolutions.

    form  how the product is written: "gate first", "value first", "in place"
    """

    def __init__(self, form: str = "gate first") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.a, self.b = nn.Conv2d(3, 32, 3, 2, 1), nn.Conv2d(32, 16, 1)
        self.down, self.up = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.average, self.silu, self.relu = nn.AdaptiveAvgPool2d(1), nn.SiLU(), nn.ReLU()
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.silu(self.a(x))
        gate = torch.sigmoid(self.up(self.relu(self.down(self.average(x)))))
        if self.form == "in place":
            return self.b(x.mul_(gate))
        return self.b(gate * x if self.form == "gate first" else x * gate)


def prepared(model: nn.Module, calls: list[Call]) -> torch.fx.GraphModule:
    graph = torchao().prepare(exported_graph(model, calls[0]), False)
    with torch.no_grad():
        calibrate(graph, calls)
    return graph


@pytest.mark.parametrize("form", ("gate first", "value first", "in place"))
def test_the_product_reads_what_the_average_reads(form: str) -> None:
    calls: list[Call] = [((noise(2, 3, 24, 24),), {})]
    graph = prepared(Excited(form), calls)
    (product,) = [node for node in graph.graph.nodes if kind(node) in ("mul", "mul_")]
    (average,) = [node for node in graph.graph.nodes if kind(node) == "adaptive_avg_pool2d"]
    assert average.args[0] not in product.args
    assert share_observers(graph) == [product.name]
    assert average.args[0] in product.args and observer_of(graph, average.args[0]) is not None
    fake = FakeQuantized(graph, calls)
    assert fake.noise(()) == 0 < fake.noise(fake.layers) < 1e-2


@pytest.mark.parametrize("wrong", ("gate of one channel", "value that nobody observes", "number"))
def test_other_products_stay_as_they_are(wrong: str) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
            self.eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.a(x))
            if wrong == "number":
                return self.b(x * 2.0) + nn.functional.adaptive_avg_pool2d(x, 1).mean()
            if wrong == "gate of one channel":
                return self.b(x * nn.functional.adaptive_avg_pool2d(x, 1).mean(1, keepdim=True))
            return self.b(x * torch.sigmoid(x.mean((2, 3), keepdim=True)))

    graph = prepared(Other(), [((noise(2, 3, 12, 12),), {})])
    code = graph.code
    assert share_observers(graph) == [] and graph.code == code


@pytest.mark.needs("vnni")
def test_quantize_leaves_no_copy_in_float32() -> None:
    model, calibration = Excited(), [noise(1, 3, 64, 64)]
    fast, report, converted = zendnn_cffi.quantize(model, calibration, tune="off", compare=False)
    assert report.sqnr_db > 25
    assert ("binary", torch.uint8, "jit:uni") in ran(fast)
    assert (torch.float32, torch.uint8) not in reorders(fast)[1:]
    ours, graph = called(fast, ((calibration[0],), {})), called(converted, ((calibration[0],), {}))
    assert (ours - graph).abs().max() < 0.05 * graph.abs().max()
