"""Tensors made of numbers alone are made while a forward is traced, but for those that change, or are random."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from fx_passes.graph.interpreter import run
from fx_passes.trace.constant_tensors import make_constants


def made(build: object) -> tuple[fx.Graph, nn.Module]:
    """The graph of x + build(graph)."""
    graph, root = fx.Graph(), nn.Module()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.add, (x, build(graph))))  # type: ignore[operator]
    make_constants(graph, root)
    return graph, root


def _arange(graph: fx.Graph) -> fx.Node:
    return graph.call_function(torch.arange, (4,), {"dtype": torch.float32})


def _grid(graph: fx.Graph) -> fx.Node:
    grid = graph.call_function(torch.meshgrid, ([_arange(graph), _arange(graph)],), {"indexing": "ij"})
    first = graph.call_function(__import__("operator").getitem, (grid, 0))
    return graph.call_method("mul", (first, 2.0))


@pytest.mark.parametrize("build", (_arange, _grid))
def test_constants(build: object) -> None:
    graph, root = made(build)
    assert [node.op for node in graph.nodes] == ["placeholder", "get_attr", "call_function", "output"]
    held = {node: getattr(root, str(node.target)) for node in graph.find_nodes(op="get_attr")}
    expected = torch.arange(4.0) if build is _arange else 2 * torch.arange(4.0)[:, None].expand(4, 4)
    assert torch.equal(run(graph, root, [torch.zeros(4, 4)]), expected.expand(4, 4)) and len(held) == 1


@pytest.mark.parametrize(
    "build",
    (
        lambda graph: graph.call_function(torch.rand, (4,)),
        lambda graph: graph.call_function(torch.empty, (4,)),
        lambda graph: graph.call_function(torch.zeros, (1 << 23,)),
        lambda graph: graph.call_function(torch.arange, (-1,)),
        lambda graph: graph.call_method("add_", (graph.call_function(torch.zeros, (4,)), 1.0)),
    ),
)
def test_others_stay(build: object) -> None:
    graph, root = made(build)
    assert not graph.find_nodes(op="get_attr") and not vars(root).keys() - vars(nn.Module()).keys()
