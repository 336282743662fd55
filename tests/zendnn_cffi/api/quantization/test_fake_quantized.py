"""A subset of layers in integers: switches round as the converted graph does, the other layers are float."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from tests.support.mixed_precision import (
    Concatenated,
    Dense,
    Encoder,
    Outlier,
    Residual,
    called,
    calls_of_noise,
    prepared,
)
from zendnn_cffi.api.quantization.correct_bias import bias_corrections
from zendnn_cffi.api.quantization.fake_quantized import FakeQuantized
from zendnn_cffi.api.quantization.layers import edges, mixed, module_path, observer_of, quantized_layers
from zendnn_cffi.api.quantization.pt2e import torchao
from zendnn_cffi.api.quantization_report import sqnr_db

CASES = [
    (Residual, (2, 3, 12, 12), False),
    (Concatenated, (2, 3, 12, 12), False),
    (Dense, (2, 3, 12, 12), False),
    (Outlier, (4, 16), False),
    (Outlier, (4, 16), True),
    (Encoder, (3, 7, 16), True),
]


def integer_layers(converted: fx.GraphModule) -> set[str]:
    """Names of the layers whose operands are dequantized."""
    return {
        node.name
        for node in converted.graph.nodes
        if node.op == "call_function" and any("dequantize" in arg.name for arg in node.all_input_nodes[:2])
        if node.target in (torch.ops.aten.conv2d.default, torch.ops.aten.linear.default)
    }


@pytest.mark.parametrize("make, shape, dynamic", CASES)
def test_each_subset_is_what_converting_it_gives(make: type[nn.Module], shape: tuple[int, ...], dynamic: bool) -> None:
    torch.manual_seed(0)
    model, calls = make().eval(), calls_of_noise(3, *shape)
    graph = prepared(model, calls, dynamic)
    fake = FakeQuantized(graph, calls)
    biases = bias_corrections(fake)
    fake.shift(biases)
    code = graph.code
    assert len(fake.layers) >= 3
    for count in range(len(fake.layers) + 1):
        for layers in itertools.islice(itertools.combinations(fake.layers, count), 4):
            result = mixed(graph, layers, biases)
            converted = torchao().convert(result) if layers else result
            assert integer_layers(converted) == set(layers)
            fake.switch(layers)
            assert sqnr_db(called(converted, calls[0]), called(fake.module, calls[0])) > 60  # a bias is added elsewhere
    assert graph.code == code
    fake.switch(())
    assert torch.equal(called(fake.module, calls[0]), called(model, calls[0])) or make is Residual
    assert fake.noise(()) == 0 and fake.noise(fake.layers) > 0


def test_observers_of_sums_and_pooling_stay_with_the_layers_that_need_them() -> None:
    graph = prepared(Residual().eval(), calls_of_noise(1, 2, 3, 12, 12))
    names = {module_path(node): node.name for node in quantized_layers(graph)}
    readers = {layer: {reader.name for _, reader in edges(graph, [names[layer]])} for layer in names}
    assert readers["stem"] == {"conv2d"}
    assert readers["body"] == {"conv2d_1", "add", "max_pool2d"}  # what it reads is pooled as integers
    assert "add" not in readers["head"] and "linear" in readers["head"]
    assert len(edges(graph, names.values())) == len(
        [1 for node in graph.graph.nodes if observer_of(graph, node) is not None for _ in node.users]
    )


@pytest.mark.parametrize(("activation", "stay"), ((F.relu, True), (torch.relu_, True), (F.silu, False)))
def test_what_a_normalization_reads_stays_with_the_layer_behind_it(activation: Any, stay: bool) -> None:
    """With a relu between them the normalization computes in integers; with nothing else it does."""
    graph = prepared(Dense(activation=activation).eval(), calls_of_noise(1, 2, 3, 12, 12))
    names = {module_path(node): node.name for node in quantized_layers(graph)}
    readers = {layer: {reader.name for _, reader in edges(graph, [names[layer]])} for layer in names}
    assert (readers["layers.1"] == {"conv2d_2", "batch_norm_1", "cat", "max_pool2d"}) is stay
    assert readers["stem"] == {"conv2d"} and readers["last"].isdisjoint({"batch_norm", "batch_norm_1"})


def test_noise_is_that_of_the_outputs() -> None:
    calls = calls_of_noise(4, 4, 16)
    model = Outlier().eval()
    fake = FakeQuantized(prepared(model, calls), calls)
    fake.switch(fake.layers)
    expected = torch.cat([called(model, call) for call in calls])
    actual = torch.cat([called(fake.module, call) for call in calls])
    assert -10 * math.log10(fake.noise(fake.layers)) == pytest.approx(sqnr_db(expected, actual), abs=1e-6)
    assert fake.noise(fake.layers, 2) == pytest.approx(
        10 ** (-sqnr_db(expected.view(4, -1)[::2], actual.view(4, -1)[::2]) / 10)
    )
