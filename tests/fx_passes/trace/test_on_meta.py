"""Nodes computed on meta tensors have sizes, dtypes and devices as of the tensors themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fx_passes.trace.on_meta import OnMeta, on_meta, up_to


def unknown(x: Tensor) -> Tensor:
    return x + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(3, 4, 2), nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x) * self.scale
        z = torch.zeros(y.shape[0], device=y.device, dtype=y.dtype)
        return y, y.shape, y.device, y.dtype, y.device == z.device, z.to(y.device), y.device.type


def found(root: nn.Module, **inputs: Any) -> tuple[fx.Graph, dict[fx.Node, Any]]:
    graph, values = fx.Tracer().trace(root), dict[fx.Node, Any]()
    computed = OnMeta(root)
    with on_meta():
        for node in graph.nodes:
            assert computed.step(node, values, inputs) is None
    return graph, values


def test_as_of_the_tensors_themselves() -> None:
    root = Net()
    graph, values = found(root, x=torch.randn(2, 3, 5, 5))
    (output,) = graph.find_nodes(op="output")
    got = [values[node] for node in output.args[0]]  # type: ignore[union-attr]
    for mine, theirs in zip(got, root(torch.randn(2, 3, 5, 5)), strict=True):
        if isinstance(theirs, Tensor):
            assert mine.is_meta and (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        else:
            assert type(mine) is type(theirs) and mine == theirs
    assert not root.conv.weight.is_meta


@pytest.mark.parametrize("given", (False, True))
def test_what_nobody_knows_is_left_out(given: bool) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(unknown, (x,))
    z = graph.call_method("relu", (y,))
    graph.output(z)
    values: dict[fx.Node, Any] = {}
    computed = OnMeta(nn.Module())
    with on_meta():
        for node in graph.nodes:
            assert computed.step(node, values, {"x": torch.ones(2)} if given else {}) is None
    assert [*values] == ([x] if given else [])


def test_what_an_operation_raises_is_returned() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    values: dict[fx.Node, Any] = {x: torch.ones(2, 3, device="meta", dtype=torch.float32)}
    wrong, item = graph.call_method("view", (x, 7)), graph.call_method("item", (x,))
    computed = OnMeta(nn.Module())
    with on_meta():
        assert isinstance(computed.step(wrong, values, {}), RuntimeError)
        assert computed.step(item, values, {}) is not None
    assert [*values] == [x]


def test_only_what_is_wanted() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y, z = graph.call_method("relu", (x,)), graph.call_method("neg", (x,))
    w = graph.call_function(torch.add, (y, 1))
    graph.output((w, z))
    assert up_to([w], graph) == [x, y, w]


def test_weights_are_looked_at_anew() -> None:
    root = Net()
    graph = fx.Tracer().trace(root)
    computed = OnMeta(root)
    (held,) = graph.find_nodes(op="get_attr")
    values: dict[fx.Node, Any] = {}
    with on_meta():
        computed.step(held, values, {})
        root.scale = nn.Parameter(torch.ones(4, 1, 1, dtype=torch.float64))
        computed.step(held, values, {})
        assert values[held].dtype == torch.float32
        computed.forget()
        computed.step(held, values, {})
    assert values[held].dtype == torch.float64
