"""What a graph tells about its values."""

from __future__ import annotations

import operator
import sys
from typing import Any

import pytest
import torch
from torch import fx, nn

from fx_passes import ops
from fx_passes.graph.inference import dtype, is_tensor, rank


def doubled(graph: fx.Graph, node: fx.Node, times: int) -> fx.Node:
    """node, added to itself again and again: 2^times paths, and a path longer than Python's stack is deep."""
    for _ in range(times):
        node = graph.call_function(ops.binary, (node, node, "add"))
    return node


def test_deep_graphs() -> None:
    root = nn.Module()
    root.weight = nn.Parameter(torch.zeros(4, 3))
    graph = fx.Graph()
    weight = graph.get_attr("weight")
    weight.meta["rank"] = 2
    last = doubled(graph, weight, 2 * sys.getrecursionlimit())
    assert rank(last) == 2
    assert dtype(last, root) == torch.float32


def test_unknown_stays_unknown() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    last = doubled(graph, x, 3)
    assert rank(last) is None
    assert dtype(last, nn.Module()) is None


@pytest.mark.parametrize(
    ("make", "expected"),
    (
        (lambda g, w: g.call_function(ops.unsqueeze, (w, 0)), 3),
        (lambda g, w: g.call_function(ops.reshape_as, (g.call_function(ops.flatten, (w, 0, -1)), w)), 2),
        (lambda g, w: g.call_function(ops.unflatten, (w, 0, (2, 2))), 3),
        (lambda g, w: g.call_function(ops.flatten, (w, 1, -1)), 2),
        (lambda g, w: g.call_function(ops.concat, ([g.placeholder("y"), w], 0)), 2),
        (lambda g, w: g.call_function(operator.getitem, (g.call_function(ops.chunk, (w, 2, 0)), 0)), 2),
        (lambda g, w: g.call_function(ops.binary, (w, 2.0, "mul")), 2),
        (lambda g, w: g.call_function(ops.reshape, (g.placeholder("y"), (1, 2, -1))), 3),
    ),
)
def test_rank(make: Any, expected: int) -> None:
    graph = fx.Graph()
    weight = graph.get_attr("weight")
    weight.meta["rank"] = 2
    assert rank(make(graph, weight)) == expected


def test_parts_and_views_of_a_tensor() -> None:
    graph = fx.Graph()
    weight = graph.get_attr("weight")
    weight.meta["rank"] = 3
    part = graph.call_function(operator.getitem, (weight, (slice(None), 0, None, slice(1, None))))
    assert is_tensor(part)
    assert rank(part) == 3
    view = graph.call_method("view", (part, 2, 3))
    assert is_tensor(view)
    assert is_tensor(graph.call_function(operator.getitem, (graph.call_function(ops.chunk, (weight, 2, 0)), 0)))
    places = graph.call_function(operator.getitem, (weight, graph.placeholder("places")))
    assert rank(places) is None
    assert not is_tensor(graph.call_method("view", (graph.placeholder("x"), 2, 3)))


@pytest.mark.parametrize(("ranks", "expected"), [((3, 2), 3), ((2, 4), 4), ((1, 2), None), ((2, 1), None)])
def test_rank_of_a_product(ranks: tuple[int, int], expected: int | None) -> None:
    graph = fx.Graph()
    a, b = graph.get_attr("a"), graph.get_attr("b")
    a.meta["rank"], b.meta["rank"] = ranks
    assert rank(graph.call_function(ops.matmul, (a, b))) == expected
