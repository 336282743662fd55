"""Weights that a model computes from parameters are constants to quantize()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import zendnn_cffi
from tests.support.lowering import net, noise
from zendnn_cffi.api.quantization.constants import fold_constants
from zendnn_cffi.api.quantization_report import sqnr_db

KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "pruned channels": lambda layer: prune.ln_structured(layer, "weight", 0.3, n=2, dim=0),
    "pruned bias": lambda layer: prune.random_unstructured(layer, "bias", 0.5),
    "pruned twice": lambda layer: prune.random_unstructured(prune.l1_unstructured(layer, "weight", 0.3), "weight", 0.3),
    "weight norm": lambda layer: nn.utils.weight_norm(layer),
    "spectral norm": lambda layer: nn.utils.spectral_norm(layer),
    "parametrized": lambda layer: parametrizations.weight_norm(layer),
}


@pytest.mark.needs("vnni")
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_layers_whose_weights_are_computed(kind: str, dynamic: bool) -> None:
    """torchao's quantizer raised IndexError for hooks that compute weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 8)).train()
    for layer in (model[0], model[3]):
        KINDS[kind](layer)
    x = noise(2, 3, 8, 8)
    model(x)  # spectral norm takes a step in training mode
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    module, report, converted = zendnn_cffi.quantize(model, [x], dynamic=dynamic, tune="off", compare=False)
    with torch.no_grad():
        assert sqnr_db(model(x), module(x)) > 30 and sqnr_db(converted(x), module(x)) > 30
    assert [layer.computes_in for layer in report.layers] == ["float32" if dynamic else "int8", "int8"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def graph_of(fn: Callable[[Any, Tensor], Any], *layers: nn.Module) -> Any:
    torch.manual_seed(0)
    graph = torch.export.export(net(fn, *layers), (noise(4, 8),), strict=True).module()
    fold_constants(graph)
    return graph


def computed_weights(graph: Any) -> list[bool]:
    linear = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    return [node.args[1].op != "get_attr" for node in linear]


class Writes(nn.Linear):
    """Changes what its weights are computed from."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("factor", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.factor.add_(1)
        return F.linear(x, self.weight * self.factor, self.bias)


STAY: dict[str, Callable[[Any, Tensor], Any]] = {
    "of the input": lambda m, x: F.linear(x, m[0].weight * x.mean()),
    "of chance": lambda m, x: F.linear(x, F.dropout(m[0].weight, 0.5, True)),
    "of chance alone": lambda m, x: F.linear(x, torch.rand(8, 8)),
    "of what is written to": lambda m, x: m[1](x),
}


@pytest.mark.parametrize("case", STAY)
def test_what_is_no_constant_stays(case: str) -> None:
    assert computed_weights(graph_of(STAY[case], nn.Linear(8, 8), Writes())) == [True]


def test_what_is_one_is_folded_once_and_for_all() -> None:
    graph = graph_of(lambda m, x: F.linear(m[0](x), m[0].weight.t().reshape(8, 8) * 2 + torch.eye(8)), nn.Linear(8, 8))
    assert computed_weights(graph) == [False, False]
    code = graph.code
    fold_constants(graph)
    assert graph.code == code


def test_layers_whose_weights_each_call_computes_stay_float() -> None:
    """They were quantized in each call, by plain PyTorch."""
    model = net(lambda m, x: m[1](F.relu(F.linear(x, m[0].weight * x.mean()))), nn.Linear(64, 64), nn.Linear(64, 64))
    _, report, _ = zendnn_cffi.quantize(model, [noise(32, 64)], tune="off", compare=False)
    assert [layer.computes_in == "int8" for layer in report.layers] == [False, True]


class ReadsTable(nn.Module):
    """Positions by layers that read a table, as in timm's MaxViT."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", noise(2, 5, 16))
        self.first, self.second, self.last = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        positions = self.second(self.first(self.table).relu())
        found: Tensor = self.last(x + positions)
        return found


class WritesPositions(ReadsTable):
    """What the last of the layers that read the table returns is written to."""

    def forward(self, x: Tensor) -> Tensor:
        positions = self.second(self.first(self.table).relu())
        found: Tensor = self.last(positions.add_(x))
        return found


@pytest.mark.parametrize("kind", (ReadsTable, WritesPositions))
@pytest.mark.parametrize("dynamic", (False, True))
def test_layers_that_read_no_input_stay_float(dynamic: bool, kind: type[ReadsTable]) -> None:
    """torchao folds the integers of what they read: with scales of the call, converting raised RuntimeError."""
    torch.manual_seed(0)
    model = kind().eval()
    x = noise(2, 5, 16)
    module, _, converted = zendnn_cffi.quantize(model, [x], dynamic=dynamic, tune="off", compare=False)
    with torch.no_grad():
        assert sqnr_db(model(x), module(x)) > 30 and sqnr_db(converted(x), module(x)) > 30
    linear = torch.ops.aten.linear.default
    read = [node.args[0].name for node in converted.graph.find_nodes(op="call_function", target=linear)]
    assert ["dequantize" in name for name in read] == [False, False, True]


FLOAT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a layer of a constant": lambda m, x: m[1](F.relu(m[0](m[2].table) + x)),
    "a sum in place": lambda m, x: m[1](F.relu(m[0](m[2].table).add_(x))),
    "a weight of the call": lambda m, x: m[1](F.conv2d(x, m[0].weight * x.mean(), padding=1) + x),
}


@pytest.mark.parametrize("case", FLOAT)
def test_sums_behind_layers_that_stay_float_round_nothing(case: str) -> None:
    """What is added was rounded for a layer that computes in float: the sum's annotation was left."""
    table = nn.Module()
    table.register_buffer("table", noise(2, 8, 9, 9))
    model, x = net(FLOAT[case], nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1), table), noise(2, 8, 9, 9)
    module, _, converted = zendnn_cffi.quantize(model, [x], tune="off", compare=False)
    (total,) = [node for node in converted.graph.nodes if str(node.target).startswith("aten.add")]
    assert "dequantize" not in str(total.args)
    with torch.no_grad():
        assert sqnr_db(model(x), module(x)) > 30 and sqnr_db(converted(x), module(x)) > 60


def test_sums_behind_layers_in_integers_round_what_is_added() -> None:
    x, layers = noise(2, 8, 9, 9), (nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1))
    model = net(lambda m, x: m[1](F.relu(m[0](x) + x)), *layers)
    _, report, converted = zendnn_cffi.quantize(model, [x], tune="off", compare=False)
    (total,) = converted.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert "dequantize" in str(total.args) and [row.computes_in for row in report.layers] == ["int8"] * 2


def test_products_of_masks_stay_whole_numbers() -> None:
    """torchao looks at their shapes alone: observing them raised NotImplementedError for 'Long' (DeBERTa)."""

    def masked(m: Any, x: Tensor) -> Tensor:
        mask = (x > 0).long()
        found: Tensor = m[0](x) * (mask * (mask + 1))
        return found

    model, x = net(masked, nn.Linear(8, 8)), noise(4, 8)
    module, report, _ = zendnn_cffi.quantize(model, [x], tune="off", compare=False)
    assert [row.computes_in for row in report.layers] == ["int8"]
    with torch.no_grad():
        assert sqnr_db(model(x), module(x)) > 30
