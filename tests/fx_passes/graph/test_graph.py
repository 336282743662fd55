"""Questions about nodes, and the small edits that passes share."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn

from fx_passes import ops
from fx_passes.graph.graph import (
    copy_graph,
    is_constant,
    is_pure,
    is_shape,
    nodes_in,
    only_user,
    only_values_count,
    remove_dead,
    sort,
    unique_name,
)


def relu(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(ops.eltwise, (x, "relu"))


def parameter(graph: fx.Graph, name: str = "w", constant: bool = True) -> fx.Node:
    node = graph.get_attr(name)
    node.meta["constant"] = constant
    return node


def test_constants() -> None:
    graph = fx.Graph()
    x, w, written = graph.placeholder("x"), parameter(graph), parameter(graph, "v", False)
    unknown = graph.call_function(torch.sin, (w,))
    marked = graph.call_function(torch.cos, (w,))
    marked.meta["constant"] = True
    deep = w
    for _ in range(3000):  # deeper than Python's stack
        deep = relu(graph, deep)
    mixed = graph.call_function(ops.binary, (deep, x, "add"))
    drawn = graph.call_function(torch.rand, (2,))
    drawn.meta["constant"] = True  # of nothing
    assert all(map(is_constant, (w, deep, marked, 3, None, (1, 2), slice(0, 1))))
    assert not any(map(is_constant, (x, written, unknown, mixed, drawn, (1, x), [w])))


def test_shapes() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    size = graph.call_function(ops.size, (x, 0))
    total = graph.call_function(operator.add, (size, 1))
    values = graph.call_function(operator.add, (x, 1))
    both = graph.call_function(operator.mul, (size, values))
    assert is_shape(size) and is_shape(total)
    assert not any(map(is_shape, (x, values, both, 3)))


def test_sizes_that_many_sums_lead_to() -> None:
    """Deeper than Python's stack; as many ways lead down as 2 to the power of the depth."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    total, values = graph.call_function(ops.size, (x, 0)), x
    for _ in range(2000):
        total, values = (graph.call_function(operator.add, (node, node)) for node in (total, values))
    assert is_shape(total) and not is_shape(values)


def test_readers() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    twice = graph.call_function(torch.add, (x, x))
    once = relu(graph, twice)
    assert only_user(x) is None and only_user(twice) is once and only_user(once) is None
    graph.output((once, once))
    assert only_user(once) is None
    assert nodes_in({"a": [x, slice(once, 1)]}) == [x, once]


def test_who_sees_strides() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    a, b = relu(graph, x), relu(graph, x)
    moved, kept = (graph.call_function(ops.transpose, (node, 0, 1)) for node in (a, b))
    graph.output((relu(graph, moved), kept))
    assert only_values_count(a) and not only_values_count(b) and not only_values_count(kept)


@pytest.mark.parametrize(
    ("target", "args", "stays"),
    (
        (torch.ops.aten.sin.default, ("x",), False),
        (torch.ops.aten.add_.Tensor, ("x", 1), True),
        (torch.ops.aten.rand.default, ([2],), True),  # others draw other numbers without it
        (torch.ops.aten._assert_async.default, ("x",), True),
        (torch.sin, ("x",), True),  # nobody said that it is pure
        (ops.eltwise, ("x", "relu"), False),
        (operator.getitem, ("x", 0), False),
        (torch.ops.aten.unbind.int, ("x",), False),
    ),
    ids=lambda given: getattr(given, "__name__", str(given)),  # no address: processes of tests compare ids
)
def test_dead_code(target: object, args: tuple[object, ...], stays: bool) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.create_node("call_function", target, tuple(x if arg == "x" else arg for arg in args))  # type: ignore
    graph.output(x)
    assert remove_dead(graph) is not stays
    assert (node in graph.nodes) is stays
    if isinstance(target, torch._ops.OpOverload):
        assert is_pure(node) is not stays


def test_order() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    a, b, c = (relu(graph, x) for _ in range(3))
    b.args = (c, "relu")
    graph.output((a, b, c))
    sort(graph, {a: [b]})
    assert [node.name for node in graph.nodes] == [n.name for n in (x, c, b, a)] + ["output"]
    graph.lint()


def test_a_circle_is_an_error() -> None:
    graph = fx.Graph()
    a, b = relu(graph, graph.placeholder("x")), relu(graph, graph.placeholder("y"))
    a.args, b.args = (b, "relu"), (a, "relu")
    graph.output(a)
    with pytest.raises(AssertionError, match="needs its own result"):
        sort(graph)


def test_a_copy_has_nodes_of_its_own() -> None:
    graph = fx.symbolic_trace(nn.ReLU()).graph
    copied = copy_graph(graph)
    assert str(copied) == str(graph) and not set(copied.nodes) & set(graph.nodes)


def test_names_that_are_free() -> None:
    module = nn.Module()
    module.part_0, module.part_2 = nn.ReLU(), nn.ReLU()
    assert unique_name(module, "part") == "part_1" and unique_name(module, "other") == "other_0"
