"""Values as JSON and back, and the names that a graph may call."""

from __future__ import annotations

import json
import math
import operator
import os
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fx_passes import ops
from fx_passes.saved.encoding import decode, encode
from fx_passes.saved.errors import FileError, NotSaved
from fx_passes.saved.functions import check_arguments, check_method, function_of, name_of
from fx_passes.saved.graphs import decode_graph, encode_graph

_plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.complex_numbers(allow_nan=False),
    st.sampled_from((torch.float32, torch.bfloat16, torch.channels_last, torch.strided, torch.device("cpu"), ...)),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers(), st.none() | st.integers()),
)  # fmt: skip
_values: Any = st.recursive(
    _plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text() | st.integers(), inner, max_size=3),
        st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


def nothing(value: Any) -> None:
    return None


@given(_values)
def test_values_come_back(value: Any) -> None:
    found = decode(json.loads(json.dumps(encode(value, nothing))), nothing)
    assert found == value and repr(found) == repr(value)


def test_numbers_that_are_none() -> None:
    assert math.isnan(decode(encode(math.nan, nothing), nothing))
    assert decode(encode(torch.Size((1, 2)), nothing), nothing) == (1, 2)


@pytest.mark.parametrize("value", (object(), torch.ones(2), int, len, {1, 2}, b"x"))
def test_what_has_no_form(value: Any) -> None:
    with pytest.raises(NotSaved, match=f"a {type(value).__name__} among the arguments"):
        encode((1, [value]), nothing)


@pytest.mark.parametrize(
    "data",
    ([], [1], {"a": 1}, ["what"], ["dtype", "float33"], ["dtype", "Tensor"], ["dtype"], ["device", "nowhere"],
     ["slice", 1], ["dict", 1], ["float", "x"], ["complex", "1"], ["layout", "__class__"], ["format", "float32"]),
)  # fmt: skip
def test_what_was_not_written_is_refused(data: Any) -> None:
    with pytest.raises(FileError):
        decode(data, nothing)


@pytest.mark.parametrize(
    "function",
    (*sorted(ops.VOCABULARY, key=lambda f: f.__name__), operator.getitem, operator.floordiv, math.ceil, getattr, len,
     torch.cat, torch.relu, torch._assert, F.relu, F.embedding, F.pad, torch.ops.aten.embedding.default,
     torch.ops.aten.add.Tensor, torch.ops.aten.__and__.Tensor, torch.ops.aten._assert_scalar.default, torch.sym_max,
     torch.fft.rfft, torch.linalg.norm, torch.special.expit, torch.Tensor.t, torch.Tensor.to, torch.Tensor.norm),
)  # fmt: skip
def test_functions_come_back_by_their_names(function: Any) -> None:
    assert function_of(name_of(function)) is function


@pytest.mark.parametrize(
    "function",
    (
        eval,
        exec,
        open,
        os.system,
        torch.load,
        torch.save,
        torch.from_file,
        operator.attrgetter,
        operator.methodcaller,
        torch.ops.aten.from_file.default,
        nothing,
        print,
        setattr,
        torch.Tensor.set_,
        torch.Tensor.numpy,
        torch.Tensor.map_,
        torch.Tensor.register_hook,
        torch.Tensor.__reduce_ex__,
        __import__,
    ),
)
def test_other_functions_are_refused(function: Any) -> None:
    with pytest.raises(NotSaved):
        name_of(function)
    rooms = ("zen", "aten", "operator", "math", "builtins", "torch", "functional", "os", "tensor", "fft", "linalg")
    for room in rooms:
        with pytest.raises(FileError):
            function_of(f"{room}.{function.__name__}")


@pytest.mark.parametrize("name", ("__reduce__", "apply_", "map_", "numpy", "register_hook", "set_", "", 3, "tofile"))
def test_other_methods_are_refused(name: Any) -> None:
    with pytest.raises(FileError, match="no saved graph calls the method"):
        check_method(name, FileError)


def test_attributes_of_tensors_alone() -> None:
    check_arguments(getattr, (1, "shape"), FileError)
    check_arguments(getattr, (1, "values"), FileError)
    for args in ((1, "__class__"), (1, "shape", 2), (1,)):
        with pytest.raises(FileError, match="no saved graph reads the attribute"):
            check_arguments(getattr, args, FileError)


def graph_of(fn: Any) -> fx.Graph:
    return fx.symbolic_trace(fn).graph


def test_graphs_come_back() -> None:
    def fn(x, y=None, *, flag=True):  # type: ignore[no-untyped-def]  # annotations are not kept
        n = x.shape[0] // 2
        return {"a": torch.cat([x[:n], x[..., None].squeeze(-1)], dim=0), "b": (x.relu() + 1.5, n, flag)}

    graph = graph_of(fn)
    found = decode_graph(json.loads(json.dumps(encode_graph(graph))))
    assert str(found) == str(graph)
    module = fx.GraphModule(torch.nn.Module(), found)
    x = torch.randn(5, 4)
    assert torch.equal(module(x)["a"], fn(x)["a"]) and module(x)["b"][1] == 2


@pytest.mark.parametrize(
    "change",
    (lambda rows: rows.reverse(), lambda rows: rows.append(rows[0]), lambda rows: rows[1].pop(),
     lambda rows: rows[1].__setitem__(0, "call"), lambda rows: rows[1].__setitem__(3, ["node", "later"]),
     lambda rows: rows[1].__setitem__(3, 3), lambda rows: rows[1].__setitem__(1, "a b"), lambda rows: rows.clear()),
)  # fmt: skip
def test_graphs_that_are_none_are_refused(change: Any) -> None:
    data = json.loads(json.dumps(encode_graph(graph_of(lambda x: torch.relu(x) + x))))
    change(data["nodes"])
    with pytest.raises(FileError):
        found = decode_graph(data)
        assert not list(found.nodes), "read"
        raise FileError("an empty graph")
