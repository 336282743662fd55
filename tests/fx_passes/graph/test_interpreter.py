"""The loop that computes graphs: right, with every kind of node, and without keeping what nobody reads any more."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, fx, nn

from fx_passes.graph.interpreter import Interpreter, call_node, run


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor, y: float = 3.0) -> Any:
        z = self.norm(x * self.scale).reshape(-1, 2)
        return {"a": (z + y, [x]), "b": None}


def test_equal_to_the_module() -> None:
    gm, x = fx.symbolic_trace(Model()), torch.randn(3, 4)
    seen: list[str] = []

    def call(node: fx.Node, args: Any, kwargs: Any) -> Any:
        seen.append(node.name)
        return call_node(node, args, kwargs)

    torch.testing.assert_close(run(gm.graph, gm, (x, 5.0), call)["a"][0], gm(x, 5.0)["a"][0])
    assert seen == ["mul", "norm", "reshape", "add"]


def test_results_are_in_containers_that_can_be_changed() -> None:
    """As generated code returns them, not in those of nodes."""
    gm, x = fx.symbolic_trace(Model()), torch.randn(3, 4)
    found = run(gm.graph, gm, (x,))
    assert (type(found), type(found["a"]), type(found["a"][1])) == (dict, tuple, list)
    found["a"][1].append(x)
    assert len(run(gm.graph, gm, (x,))["a"][1]) == 1


def test_a_default_and_constants_by_name() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor, y: float = 3.0) -> Any:
            return (x + y).neg(), [x]

    graph = fx.symbolic_trace(Plain()).graph
    x = torch.ones(2)
    result, (same,) = run(graph, {}, (x,))
    assert same is x and result.tolist() == [-4.0, -4.0]
    assert run(graph, {}, (x, 1.0))[0].tolist() == [-2.0, -2.0]

    graph = fx.Graph()
    graph.output(graph.call_function(torch.add, (graph.placeholder("x"), graph.get_attr("a.b"))))
    assert run(graph, {"a.b": 5}, (x,)).tolist() == [6.0, 6.0]


def test_values_are_let_go() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def made(x: Tensor) -> Tensor:
        alive.append(weakref.ref(result := x + 1))
        return result

    def count(x: Tensor, *others: Tensor) -> Tensor:
        return torch.tensor(sum(ref() is not None for ref in alive))

    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(made, (x,))
    b = graph.call_function(made, (a,))  # a is read again below
    c = graph.call_function(made, (b,))  # b is not
    graph.output(graph.call_function(count, (a, c)))
    assert int(run(graph, {}, (torch.ones(2),))) == 2


def test_values_that_are_known_are_not_computed() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    weight = graph.get_attr("weight")
    folded = graph.call_function(torch.neg, (weight,))
    graph.output(graph.call_function(torch.add, (x, folded)))
    known = {folded: torch.tensor(4.0)}  # of weight nothing is left
    assert int(Interpreter(graph, {**known, weight: None})((torch.tensor(1.0),))) == 5
