"""Lengths of sequences stay free behind recurrent networks, and results are known by the sizes and strides of eager."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import fx, nn

from fx_passes.trace.export import export
from fx_passes.trace.recurrent_sizes import lengths_free
from tests.support.lowering import noise

STACKS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm, batch first": (nn.LSTM, {"batch_first": True}),
    "lstm, both ways, two layers": (nn.LSTM, {"bidirectional": True, "num_layers": 2}),
    "lstm, projected": (nn.LSTM, {"proj_size": 3, "bidirectional": True, "batch_first": True}),
    "lstm, without biases": (nn.LSTM, {"bias": False}),
    "gru": (nn.GRU, {"batch_first": True, "num_layers": 2}),
    "gru, both ways": (nn.GRU, {"bidirectional": True}),
    "tanh": (nn.RNN, {"batch_first": True}),
    "relu": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
}


class Between(nn.Module):
    """A recurrent network whose states are results, too."""

    def __init__(self, kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
        super().__init__()
        self.sequence = kind(6, 5, **options)

    def forward(self, x: torch.Tensor) -> Any:
        result, states = self.sequence(x.relu())
        return result, states, result.shape[0] + result.shape[1]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("case", STACKS)
def test_lengths_stay_free(case: str) -> None:
    torch.manual_seed(0)
    model = Between(*STACKS[case]).eval()
    graph, _ = export(model, (noise(4, 7, 6),), {})
    module = fx.GraphModule(model, graph)
    for shape in ((4, 7, 6), (7, 4, 6), (2, 13, 6)):
        x = noise(*shape)
        with torch.no_grad():
            expected, found = model(x), module(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert found[0].stride() == expected[0].stride()
    (layer,) = (node for node in graph.nodes if "input" in str(node.target))
    for value, real in zip(layer.meta["val"], layer.target(*_example(model, graph, layer)), strict=True):
        sizes = [int(size) for size in (*value.shape, *value.stride())]
        assert sizes == [*real.shape, *real.stride()] and value.dtype == real.dtype


def _example(model: nn.Module, graph: fx.Graph, layer: fx.Node) -> Any:
    """The arguments of a node for sizes of the example."""

    def number(node: fx.Node) -> Any:
        if node.op == "get_attr":
            return model.get_parameter(str(node.target)).detach()
        value = node.meta["val"]
        return noise(*(int(size) for size in value.shape)).as_strided(*([int(n) for n in s] for s in _layout(value)))

    return fx.map_arg(layer.args, number)


def _layout(value: torch.Tensor) -> tuple[Any, Any]:
    return value.shape, value.stride()


def test_numbers_come_in_other_threads_and_afterwards() -> None:
    lstm = nn.LSTM(6, 5).eval()
    op: Any = torch.ops.aten.lstm.input
    before = dict(op.py_kernels)
    states = [torch.zeros(1, 2, 5), torch.zeros(1, 2, 5)]
    args = noise(3, 2, 6), states, list(lstm._flat_weights), True, 1, 0.0, *[False] * 3
    found: list[Any] = []
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    with torch.no_grad():
        expected = op(*args)
        with lengths_free():
            with lengths_free():
                thread = threading.Thread(target=lambda: found.append(op.py_kernels[key](*args)))
                thread.start()
                thread.join()
            assert op.py_kernels[key] is not before[key]
        found.append(op(*args))
    assert op.py_kernels == before
    for each in found:
        torch.testing.assert_close(each, expected)


def test_it_ends_with_an_error() -> None:
    op: Any = torch.ops.aten.gru.input
    before = dict(op.py_kernels)
    with pytest.raises(KeyError), lengths_free():
        raise KeyError
    assert op.py_kernels == before
