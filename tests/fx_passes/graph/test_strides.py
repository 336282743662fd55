"""Whose strides can be seen: of the output, of what plain PyTorch reads, and of what those are computed of."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fx_passes import ops
from fx_passes.graph.strides import strides_seen


def names(graph: fx.Graph) -> set[str]:
    return {node.name for node in strides_seen(graph)}


def chain(graph: fx.Graph, source: fx.Node, *kinds: str) -> fx.Node:
    for kind in kinds:
        source = graph.call_function(ops.eltwise, (source, kind))
        source.name = kind
    return source


def test_the_output_and_what_it_is_computed_of() -> None:
    graph = fx.Graph()
    graph.output(chain(graph, graph.placeholder("x"), "relu", "tanh"))
    assert names(graph) == {"x", "relu", "tanh"}


def test_what_makes_rows_hides_its_operands() -> None:
    graph = fx.Graph()
    w = graph.get_attr("w")
    product = graph.call_function(ops.linear, (chain(graph, graph.placeholder("x"), "relu"), w))
    graph.output(product)
    assert strides_seen(graph) == {product}


def test_plain_pytorch_sees_what_it_reads_though_nobody_reads_its_result() -> None:
    graph = fx.Graph()
    value = chain(graph, graph.placeholder("x"), "relu")
    graph.call_function(torch.sin, (value,))
    graph.output(())
    assert names(graph) == {"x", "relu"}


def test_sizes_tell_nothing() -> None:
    graph = fx.Graph()
    value = chain(graph, graph.placeholder("x"), "relu")
    size = graph.call_function(ops.size, (value, 0))
    graph.output(graph.call_function(operator.add, (size, 1)))
    assert "relu" not in names(graph)


def test_pieces_hand_on() -> None:
    graph = fx.Graph()
    halves = graph.call_function(ops.chunk, (chain(graph, graph.placeholder("x"), "relu"), 2, 1))
    graph.output(graph.call_function(operator.getitem, (halves, 1)))
    assert names(graph) >= {"x", "relu", "chunk"}


def test_nothing_is_seen_of_what_nobody_reads() -> None:
    graph = fx.Graph()
    chain(graph, graph.placeholder("x"), "relu")
    graph.output(())
    assert not strides_seen(graph)
