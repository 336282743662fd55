"""torch.roll within regions: parts copied by reorders, each to where it goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.rules import lower_graph
from tests.support.lowering import net, noise, offload


def became(fn: Callable[..., Any], *inputs: Tensor, layers: tuple[nn.Module, ...] = (), **options: Any) -> list[str]:
    found = offload(net(fn, *layers), *inputs, **options)
    return [node.became for node in found.nodes if "roll" in node.name]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    moves=st.lists(st.tuples(st.integers(-9, 9), st.integers(-5, 4)), min_size=1, max_size=3),
)
def test_any_shifts_along_any_dimensions(shape: list[int], moves: list[tuple[int, int]]) -> None:
    """Further than the dimension is long, along one twice, by nothing."""
    shifts = tuple(shift for shift, _ in moves)
    dims = tuple(dim % len(shape) - len(shape) * (dim < 0) for _, dim in moves)
    assert became(lambda m, x: torch.roll(x.exp(), shifts, dims).tanh(), noise(*shape)) == ["roll"]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [16, 5])
@pytest.mark.parametrize("dims", [(2, 3), (1, 0), (-1,)])
def test_beside_convolutions(
    dims: tuple[int, ...], channels: int, layout: torch.memory_format, dtype: torch.dtype | None
) -> None:
    layers = nn.Conv2d(3, channels, 3), nn.Conv2d(channels, 4, 1)
    x = noise(2, 3, 9, 8).contiguous(memory_format=layout)
    shifts = (3, -2)[: len(dims)]
    assert became(lambda m, x: m[1](m[0](x).roll(shifts, dims)), x, layers=layers, dtype=dtype) == ["roll"]


@pytest.mark.parametrize("spelling", ["function", "method", "by name", "exported"])
def test_spellings(spelling: str) -> None:
    functions: dict[str, Callable[..., Tensor]] = {
        "function": lambda m, x: m[0](torch.roll(m[0](x), (1, -2), (1, 2))),
        "method": lambda m, x: m[0](m[0](x).roll(2, 1)),
        "by name": lambda m, x: m[0](torch.roll(input=m[0](x), shifts=-1, dims=1)),
    }
    model, x = net(functions.get(spelling, functions["function"]), nn.Linear(8, 8)), noise(2, 5, 8)
    given = torch.export.export(model, (x,)) if spelling == "exported" else model
    fast = zendnn_cffi.optimize(given, tune="off")
    assert len(fast.regions()) == 1
    torch.testing.assert_close(fast(x), model(x))
    nodes = zendnn_cffi.explain(fast).nodes
    assert sorted(node.became for node in nodes) == ["inner_product", "inner_product", "roll"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda m, x: m[1](m[0](x).roll(3)),  # of all elements in a row
        lambda m, x: m[1](torch.roll(m[0](x), (1, 2), ())) if x.dim() == 1 else m[1](m[0](x).roll(2, ())),
    ],
    ids=["no dimension", "none of them"],
)
def test_elements_in_a_row_are_left_to_pytorch(fn: Callable[..., Tensor]) -> None:
    model, x = net(fn, nn.Linear(8, 8), nn.Linear(8, 8)), noise(2, 5, 8)
    fast = zendnn_cffi.optimize(model, tune="off")
    torch.testing.assert_close(fast(x), model(x))
    assert len(fast.regions()) == 2


def test_bad_dimensions_raise_as_in_eager() -> None:
    model, x = net(lambda m, x: m[0](x).roll(1, 4), nn.Linear(8, 8)), noise(2, 5, 8)
    fast = zendnn_cffi.optimize(model, tune="off")
    for module in (model, fast):
        with pytest.raises(IndexError, match="Dimension out of range"):
            module(x)


def test_other_numbers_and_empty_tensors() -> None:
    model = net(lambda m, x: m[0](x).roll(1, 0), nn.Linear(8, 8))
    fast = zendnn_cffi.optimize(model, tune="off")
    assert fast(torch.empty(0, 8)).shape == (0, 8)
    ids = torch.arange(12).view(3, 4)
    looked_up = net(lambda m, i: m[0](i.roll(1, 1)).exp(), nn.Embedding(12, 8))
    fast = zendnn_cffi.optimize(looked_up, tune="off")
    torch.testing.assert_close(fast(ids), looked_up(ids))
    assert len(fast.regions()) == 1  # what computes nothing makes none of its own


def lowered_of_integers(channels: int) -> tuple[Any, Any]:
    """A roll of dequantized integers."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    quantized = graph.call_function(ops.quantize, (x, 0.05, 7, None, 0, 255, torch.uint8))
    value = graph.call_function(ops.dequantize, (quantized, 0.05, 7, None, torch.float32))
    rolled = graph.call_function(ops.roll, (value, (-3, -3), (1, 2)))
    graph.output(rolled)
    operations, values = lower_graph(graph, [TensorSpec.of(torch.empty(2, 8, 8, channels))], {})
    (operation,) = (each for each in operations if each.node is rolled)
    return operation, values


@pytest.mark.parametrize("channels", [32, 5])
def test_integers_are_rolled_as_integers(channels: int) -> None:
    """In words of four bytes, where channels fill these: the library's kernel takes half the time."""
    operation, _ = lowered_of_integers(channels)
    of_integers = [c for c in operation.candidates if str(c.srcs[0]).count("uint8")]
    assert of_integers and all(len(c.calls) == 4 for c in of_integers)


@pytest.mark.parametrize("entry", ["optimize", "compile"])
def test_shifted_windows_are_one_region(entry: str) -> None:
    """As of Swin transformers: each block cut the network in three."""

    def windows(m: Any, x: Tensor) -> Tensor:
        y = torch.roll(m[0](x), (-2, -2), (1, 2))
        y = y.view(2, 2, 4, 2, 4, 16).permute(0, 1, 3, 2, 4, 5).reshape(8, 16, 16)
        y = m[1](y).view(2, 2, 2, 4, 4, 16).permute(0, 1, 3, 2, 4, 5).reshape(2, 8, 8, 16)
        return torch.roll(y, (2, 2), (1, 2)) + x

    model, x = net(windows, nn.LayerNorm(16), nn.Linear(16, 16)), noise(2, 8, 8, 16)
    if entry == "optimize":
        assert len(zendnn_cffi.optimize(model).regions()) == 1
        assert became(windows, x, layers=(nn.LayerNorm(16), nn.Linear(16, 16))) == ["roll", "roll"]
        offload(model, x, tune="full")
    else:
        torch.testing.assert_close(torch.compile(model, backend="zendnn")(x), model(x))
