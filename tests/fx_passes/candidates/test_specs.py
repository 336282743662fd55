"""What a region knows of its nodes before anything runs."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.specs import RegionValues, TensorSpec


def held(function: Any) -> dict[fx.Node, Any]:
    return inspect.getclosurevars(function).nonlocals["part"].numbers


def test_a_computation_holds_only_the_numbers_it_needs() -> None:
    """Not what these were found from: XCiT took 2^depth steps when it walked on through that."""
    graph = fx.Graph()
    x = last = graph.placeholder("x")
    for _ in range(12):
        last = graph.call_function(torch.add, (last, last))
    rows = graph.call_function(getattr, (last, "shape"))
    count = graph.call_function(operator.getitem, (rows, 1))
    node = graph.call_function(torch.reshape, (x, (count, -1)))
    graph.output((last, node))
    values = RegionValues(graph, [TensorSpec.of(torch.empty(6, 4))], {})
    function = values.computation(node, values.operands(node))
    given = torch.randn(6, 4)
    assert torch.equal(function(given), given.reshape(4, 6))
    assert list(held(function)) == [count]


def test_a_computation_goes_through_tuples_of_tensors_to_where_they_came_from() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    parts = graph.call_function(torch.chunk, (x, 2, -1))
    first, second = (graph.call_function(operator.getitem, (parts, i)) for i in range(2))
    node = graph.call_function(torch.cat, ((second, first), -1))
    graph.output(node)
    values = RegionValues(graph, [TensorSpec.of(torch.empty(3, 8))], {})
    assert values.operands(first) == (x,)
    function = values.computation(first, (x,))
    given = torch.randn(3, 8)
    assert torch.equal(function(given), given[:, :4])
    assert list(held(function)) == [parts]


def test_what_is_covered_is_computed_by_its_readers() -> None:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    inner = graph.call_function(torch.mul, (x, weight))
    node = graph.call_function(torch.add, (inner, x))
    graph.output(node)
    given, parameter = torch.randn(3, 4), torch.randn(3, 4)
    values = RegionValues(graph, [TensorSpec.of(given)], {"weight": parameter})
    assert values.operands(node) == (inner, x) and not values.constants_of(node)
    values.cover(inner)
    assert values.operands(node) == (x,) and [*values.constants_of(node)] == [weight]
    for computed in (values.compute(node, {x: given}), values.computation(node, (x,))(given)):
        assert torch.equal(computed, given * parameter + given)


def test_constants_that_fakes_ask_for_are_computed_for_real() -> None:
    """They are computed when they are first asked for, which may be while a body runs on fake tensors."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    turned = graph.call_function(ops.transpose, (weight, 0, 1))
    node = graph.call_function(torch.mm, (x, turned))  # no operation, so no rule
    graph.output(node)
    parameter = torch.randn(4, 6)
    values = RegionValues(graph, [TensorSpec.of(torch.empty(6, 6))], {"weight": parameter})
    assert values.specs[node] == TensorSpec((6, 4), torch.float32, (4, 1))
    assert torch.equal(values.constants[turned], parameter.t())


def test_a_constant_indexed_by_a_constant_is_known() -> None:
    """A table of positions, looked up in a table of biases: no rule knows the shape, the plain-torch body does."""
    graph = fx.Graph()
    x, table, positions = graph.placeholder("x"), graph.get_attr("table"), graph.get_attr("positions")
    rows = graph.call_function(ops.index, (table, positions))
    graph.output(graph.call_function(ops.binary, (x, rows, "add")))
    parameters = {"table": torch.randn(5, 3), "positions": torch.tensor([4, 0, 4, 1])}
    values = RegionValues(graph, [TensorSpec.of(torch.empty(4, 3))], parameters)
    assert values.constants[rows].equal(parameters["table"][parameters["positions"]])
    assert values.known(rows) == TensorSpec.of(torch.empty(4, 3))
