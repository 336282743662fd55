"""Code that calls PyTorch's bindings runs the operators of the graph, and returns what they do."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zendnn_cffi
from fx_passes import ops
from fx_passes.graph.bindings import FUNCTIONS, METHODS, OWN_METHODS, TUPLES, UNARY, by_bindings

aten = torch.ops.aten
X = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))
SQUARE = X[0, :, :4].contiguous()
INDEX = torch.tensor([[[1, 0, 2, 1, 0]]])
PAIRS = torch.view_as_complex(torch.stack((X, OTHER), -1))
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

# overload -> arguments, and keyword arguments where a dict is last
CALLS: Mapping[Any, tuple[Any, ...]] = MappingProxyType(
    {
        aten.clone.default: (X.transpose(0, 1), {"memory_format": torch.contiguous_format}),
        aten.copy_.default: (X, OTHER),
        aten.repeat.default: (X, [1, 2, 1]),
        aten.gather.default: (X, 1, INDEX),
        aten.scatter.value: (X, 1, INDEX, 2.0),
        aten.scatter.src: (X, 1, INDEX, OTHER),
        aten.scatter_add.default: (X, 1, INDEX, OTHER),
        aten.index_select.default: (X, 1, INDEX.flatten()),
        aten.cumsum.default: (X, -1, {"dtype": torch.float64}),
        aten.masked_fill.Scalar: (X, OTHER > 0, -1.5),
        aten.masked_fill.Tensor: (X, OTHER > 0, torch.tensor(2.0)),
        aten.bitwise_not.default: (OTHER > 0,),
        aten.logical_not.default: (X,),
        **{getattr(aten, name).Scalar: (X, 0.5) for name in COMPARISONS},
        **{getattr(aten, name).Tensor: (X, OTHER) for name in COMPARISONS},
        aten.argmax.default: (X, 1, True),
        aten.roll.default: (X, [1], [0]),
        aten.flip.default: (X, [0, 2]),
        aten.triu.default: (SQUARE, 1),
        aten.tril.default: (SQUARE, -1),
        aten.any.dim: (X > 0, 1, True),
        aten.all.dim: (X > 0, 1),
        aten.any.default: (X > 0,),
        aten.all.default: (X > 0,),
        aten.diagonal.default: (X, 0, 1, 2),
        aten.fill_.Scalar: (X, 3),
        aten.zero_.default: (X,),
        aten.histc.default: (X, 4, 0, 1),
        aten.floor_divide.default: (X, OTHER),
        aten.new_zeros.default: (X, [2, 3], {"dtype": torch.int64, "pin_memory": False}),
        aten.new_ones.default: (X, [2, 3]),
        aten.new_full.default: (X, [2], 7.0, {"pin_memory": False}),
        aten.where.self: (X > 0, X, OTHER),
        aten.stack.default: ([X, OTHER], 1),
        aten._conj.default: (PAIRS,),
        aten.view_as_complex.default: (X[..., :4].reshape(3, 4, 2, 2),),
        aten.view_as_real.default: (PAIRS,),
        aten.zeros_like.default: (X, {"pin_memory": False}),
        aten.ones_like.default: (X, {"dtype": torch.bool, "memory_format": torch.preserve_format}),
        aten.full_like.default: (X, 2, {"pin_memory": False}),
        aten._grouped_mm.default: (SQUARE, X[:, :, :4].contiguous(), torch.tensor([1, 3, 4], dtype=torch.int32)),
        aten.fft_rfft.default: (X, 5, 1),
        aten.fft_irfft.default: (PAIRS, 6, -1),
        aten.topk.default: (X, 2, 1),
        aten.sort.default: (X, -1, True),
        aten.slice.Tensor: (X, 1, -3, 9223372036854775807),
        aten.select.int: (X, 1, -1),
        aten.to.dtype: (X, torch.float64),
        aten.index.Tensor: (X, [INDEX.flatten(), INDEX.flatten()]),
    }
)
EMPTY = {aten.new_empty.default: (X, [2, 3], {"pin_memory": False}), aten.empty_like.default: (X,)}
VOCABULARY: Mapping[Any, tuple[Any, ...]] = MappingProxyType(
    {
        ops.reshape: (X, (5, -1)),
        ops.permute: (X, (2, 0, 1)),
        ops.transpose: (X, 0, 2),
        ops.unsqueeze: (X, 1),
        ops.expand: (X[:, :1], (-1, 4, 5)),
        ops.flatten: (X, 1, 2),
        ops.unflatten: (X, 1, (2, 2)),
        ops.contiguous: (X.transpose(0, 1),),
        ops.index: (X, (slice(None), None, 1, ...)),
        ops.narrow: (X, -1, 1, None),
        ops.reduce: (X, "max", (0, -1), True),
        ops.eltwise: (X, "exp", 0.0, 0.0),
        ops.binary: (X, 2, "mul"),
    }
)


class Recorded(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def graph_of(
    target: Any, *arguments: Any, is_read_in_pieces: bool = True, **kwargs: Any
) -> tuple[fx.Graph, list[Tensor]]:
    """A graph of one call, and the tensors that it takes; what is a tuple is read in pieces."""
    graph, tensors = fx.Graph(), list[Tensor]()

    def placed(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            node = graph.placeholder(f"x{len(tensors)}")
            node.meta["val"] = value
            return node
        return [placed(each) for each in value] if isinstance(value, list) else value

    node = graph.call_function(target, tuple(map(placed, arguments)), kwargs)
    is_read = target in TUPLES and is_read_in_pieces
    graph.output(tuple(graph.call_function(operator.getitem, (node, i)) for i in range(2)) if is_read else node)
    return graph, tensors


def ran(graph: fx.Graph, tensors: list[Tensor]) -> tuple[Any, list[Tensor], list[str]]:
    """The result of a graph's code, its inputs after the call, and the operators that ran."""
    copies = [tensor.clone() for tensor in tensors]
    with torch.no_grad(), Recorded() as recorded:
        result = fx.GraphModule(nn.Module(), graph)(*copies)
    return result, copies, recorded.names


def arguments_of(call: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (call[:-1], call[-1]) if isinstance(call[-1], dict) else (call, {})


def test_every_call_has_an_example() -> None:
    assert {
        *METHODS,
        *FUNCTIONS,
        *TUPLES,
        aten.slice.Tensor,
        aten.select.int,
        aten.to.dtype,
        aten.index.Tensor,
    } == CALLS.keys() | EMPTY.keys()
    assert OWN_METHODS.keys() <= VOCABULARY.keys()


@pytest.mark.parametrize("target", (*CALLS, *EMPTY, *VOCABULARY), ids=lambda target: getattr(target, "__name__", ""))
def test_the_same_operators_run(target: Any) -> None:
    arguments, kwargs = arguments_of({**CALLS, **EMPTY, **VOCABULARY}[target])
    graph, tensors = graph_of(target, *arguments, **kwargs)
    direct = by_bindings(graph)
    assert target not in {node.target for node in direct.nodes} and target in {node.target for node in graph.nodes}
    expected, written_to, names = ran(graph, tensors)
    result, written_by_binding, names_by_binding = ran(direct, tensors)
    assert names_by_binding == names
    torch.testing.assert_close(written_by_binding, written_to, rtol=0, atol=0)
    if target not in EMPTY:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    if isinstance(result, Tensor):
        assert (result.shape, result.dtype, result.stride()) == (expected.shape, expected.dtype, expected.stride())


@pytest.mark.parametrize("kind", UNARY)
def test_element_wise_operations(kind: str) -> None:
    graph, tensors = graph_of(ops.eltwise, X.abs(), kind, 0.0, 0.0)
    assert UNARY[kind] in {node.target for node in by_bindings(graph).nodes}
    torch.testing.assert_close(ran(by_bindings(graph), tensors)[0], ran(graph, tensors)[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("target", "call"),
    (
        (aten.topk.default, (X, 2)),  # handed out as a whole: a tuple, not a named one
        (aten.mul.Scalar, (X, 2.0)),  # torch.mul takes another overload
        (aten.slice.Tensor, (X, 1, 0, 4, 2)),
        (aten.to.dtype, (X, torch.float64, False, True)),
        (aten.index.Tensor, (X, [torch.tensor(1)])),
        (aten.index.Tensor, (X, [None, INDEX.flatten()])),
        (ops.binary, (X, OTHER[:1], "mul")),  # may broadcast in short loops
        (ops.eltwise, (X, "clip", 0.0, 1.0)),
        (ops.size, (X, 1)),  # size is no method of every array
    ),
)
def test_others_stay(target: Any, call: tuple[Any, ...]) -> None:
    arguments, kwargs = arguments_of(call)
    graph, _ = graph_of(target, *arguments, is_read_in_pieces=False, **kwargs)
    assert by_bindings(graph) is graph


@st.composite
def parts_of_parts(draw: Any) -> list[tuple[Any, ...]]:
    """select and slice, each of what the one before leaves of [4, 5, 6, 7]."""
    sizes, calls = [4, 5, 6, 7], list[tuple[Any, ...]]()
    while sizes and len(calls) < 5 and draw(st.booleans()) | (not calls):
        dim = draw(st.integers(0, len(sizes) - 1))
        if draw(st.booleans()):
            calls.append((aten.select.int, dim, draw(st.integers(-sizes[dim], sizes[dim] - 1))))
            del sizes[dim]
        else:
            start, stop = sorted(draw(st.tuples(st.integers(0, sizes[dim] - 1), st.integers(1, sizes[dim]))))
            stop += start == stop
            given_dim = dim - len(sizes) if draw(st.booleans()) else dim
            calls.append((aten.slice.Tensor, given_dim, start, stop))
            sizes[dim] = stop - start
    return calls


@given(calls=parts_of_parts(), writes=st.booleans(), is_read=st.booleans())
@settings(deadline=None, max_examples=150)
def test_parts_of_parts(calls: list[tuple[Any, ...]], writes: bool, is_read: bool) -> None:
    graph = fx.Graph()
    whole = node = graph.placeholder("x")
    number = graph.placeholder("number")
    for target, *arguments in calls:
        node = graph.call_function(target, (node, *arguments))
    if writes:
        copied = graph.call_function(aten.copy_.default, (node, number))
        node = copied if is_read else whole
    graph.output(node)
    tensors = [torch.arange(840.0).view(4, 5, 6, 7), torch.tensor(-1.0)]
    expected, after, _ = ran(graph, tensors)
    result, after_direct, _ = ran(by_bindings(graph), tensors)
    torch.testing.assert_close((result, after_direct), (expected, after), rtol=0, atol=0)


def test_loops_over_rows_take_and_set_items() -> None:
    """A loop as in gated delta rules: a call of select or slice for each dimension would take longer than eager."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y = y - torch.linalg.vector_norm(y, dim=-1, keepdim=True)
            for i in range(1, 4):
                row = y[..., i, :i].clone()
                y[..., i, :i] = row + (row.unsqueeze(-1) * y[..., :i, :i].clone()).sum(-2)
            return y

    model, x = Rows().eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        fast: Any = zendnn_cffi.optimize(program, tune="off")
        torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)
    targets = {node.target for node in fast.graph.nodes}
    assert {aten.select.int, aten.copy_.default} <= targets and fast.regions()
    assert "torch.ops.aten" not in fast.code and "operator_setitem" in fast.code or "] = " in fast.code
