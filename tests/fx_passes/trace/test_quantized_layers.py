"""torch.export of layers of integers: one operator each, of plain tensors, that computes what the vocabulary does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes.trace.export import export
from fx_passes.trace.quantized_layers import AsOperators, as_operators
from tests.support.int8_tensors import CONFIGS, block, quantized
from tests.support.lowering import noise


@pytest.mark.parametrize("config", CONFIGS)
def test_each_layer_is_one_operator(config: str) -> None:
    graph, _ = export(block(config, asks=True), (noise(3, 5, 64),), {})
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert called.count("zendnn_cffi.int8_linear.default") == 2
    assert not [name for name in called if "_int_mm" in name or "qparams" in name]


@pytest.mark.parametrize("shape", [(3, 64), (64,), (2, 3, 5, 64)])
@pytest.mark.parametrize("config", CONFIGS)
def test_the_operator_computes_the_layer(config: str, shape: tuple[int, ...]) -> None:
    layer: Any = quantized(nn.Linear(64, 48), config)
    x = noise(*shape)
    with torch.no_grad(), AsOperators():
        ours = F.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(ours, layer(x), atol=1e-5, rtol=1e-5)
    assert ours.shape == (*shape[:-1], 48)


def test_the_operator_has_shapes_without_numbers() -> None:
    layer: Any = quantized(nn.Linear(64, 48))
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode, AsOperators():
        y = F.linear(mode.from_tensor(noise(2, 3, 64)), layer.weight, layer.bias)
    assert y.shape == (2, 3, 48) and y.dtype == torch.float32


def test_other_calls_are_left_alone() -> None:
    layer: Any = quantized(nn.Linear(64, 48))
    x, w = noise(3, 64), noise(5, 64)
    with torch.no_grad(), AsOperators():
        assert torch.equal(F.linear(x, w), torch.mm(x, w.t()))
        half = F.linear(x.bfloat16(), layer.weight, layer.bias)
    with torch.no_grad():
        assert torch.equal(half, layer(x.bfloat16())) and half.dtype == torch.bfloat16


def test_models_without_such_layers_are_followed_without_the_mode() -> None:
    assert isinstance(as_operators(block()), AsOperators)
    assert not isinstance(as_operators(nn.Linear(4, 4)), AsOperators)
