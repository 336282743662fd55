"""Code without pytree takes the same values out of arguments, and puts the same structures together."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from fx_passes.graph.graph import copy_graph
from fx_passes.graph.structure_code import StructureCode, paths_of_arguments, with_structure_code

NUMBERS = st.integers(0, 9)
STRUCTURES = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("ab'\\\" 0", max_size=3), inner, max_size=3),
    ),
    max_leaves=8,
)


def graph_with(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> fx.Graph:
    """A graph that returns its values in the structure of result, or in the arguments' own in reverse order."""
    leaves, in_spec = pytree.tree_flatten((args, kwargs))
    graph = fx.Graph()
    values = [graph.placeholder(f"value_{i}") for i in range(len(leaves))]
    _, out_spec = pytree.tree_flatten(result)
    found = values[::-1] if result is None or out_spec.num_leaves != len(values) else values
    if out_spec.num_leaves != len(values):
        _, out_spec = pytree.tree_flatten(list(values))
    graph.output(tuple(found))
    names = [*(f"arg_{i}" for i in range(len(args))), *kwargs]
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(names, in_spec, out_spec)))
    return graph


def ran(graph: fx.Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
    gm = fx.GraphModule(nn.Module(), graph)
    return gm.forward(*args, **kwargs), gm.code


@given(
    args=st.lists(STRUCTURES, max_size=3).map(tuple),
    kwargs=st.dictionaries(st.sampled_from(["mask", "rope", "x"]), STRUCTURES, max_size=2),
    result=STRUCTURES,
)
@settings(deadline=None, max_examples=200)
def test_the_same_values_in_the_same_structures(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    graph = graph_with(args, kwargs, result)
    direct = copy_graph(graph)
    assert with_structure_code(direct)
    expected, _ = ran(graph, args, kwargs)
    found, code = ran(direct, args, kwargs)
    assert found == expected and type(found) is type(expected)
    assert "pytree" not in code
    if isinstance(found, dict):
        assert list(found) == list(expected)


@pytest.mark.parametrize("container", (OrderedDict(a=1), {1: 2}, slice(1)))
def test_other_containers_are_for_pytree(container: Any) -> None:
    graph = graph_with((3, [container]), {})
    _, spec = pytree.tree_flatten(((3, [container]), {}))
    is_leaf = not isinstance(container, dict)
    assert (paths_of_arguments(["a", "b"], spec) is None) != is_leaf
    direct = copy_graph(graph)
    with_structure_code(direct)
    assert ran(direct, (3, [container]), {})[0] == ran(graph, (3, [container]), {})[0]


def test_graphs_of_plain_code_stay() -> None:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    assert not with_structure_code(graph) and not isinstance(graph._codegen, StructureCode)
