"""Names of regions: equal where times are equal."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.specs import TensorSpec
from fx_passes.region.key import region_key
from fx_passes.region.options import RegionOptions

Pair = tuple[float, int]


def graph_of(*pairs: Pair, axis: int | None = None) -> fx.Graph:
    """A tensor rounded to integers and back, by each of these scales and zero points in turn."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    for scale, zero_point in pairs:
        kept = graph.call_function(ops.quantize, (node, scale, zero_point, axis, 0, 255, torch.uint8))
        node = graph.call_function(ops.dequantize, (kept, scale, zero_point, axis, torch.float32))
    graph.output(node)
    return graph


def key(graph: fx.Graph, *, exact: bool = False) -> str:
    specs = [TensorSpec.of(torch.empty(2, 3))]
    return region_key(graph, specs, {}, RegionOptions(), exact=exact)


@pytest.mark.parametrize(
    ("first", "second", "is_equal"),
    [
        ([(0.5, 7), (0.25, 0)], [(0.1, 130), (3.0, 0)], True),
        ([(0.5, 7), (0.5, 7)], [(0.1, 3), (0.1, 3)], True),
        ([(0.5, 7), (0.5, 7)], [(0.1, 3), (0.2, 3)], False),
        ([(0.5, 7), (0.5, 7)], [(0.1, 3), (0.1, 4)], False),
        ([(0.5, 7)], [(0.5, 0)], False),
        ([(0.5, 7)], [(0.5, 7), (0.25, 7)], False),
    ],
    ids=["other numbers", "both alike", "other scale", "other zero point", "no zero point", "one more"],
)
def test_numbers_of_a_calibration_do_not_count(first: list[Pair], second: list[Pair], is_equal: bool) -> None:
    assert (key(graph_of(*first)) == key(graph_of(*second))) is is_equal
    assert key(graph_of(*first), exact=True) != key(graph_of(*second), exact=True)


def test_what_else_is_asked_counts() -> None:
    assert key(graph_of((0.5, 7))) != key(graph_of((0.5, 7), axis=1))


def test_graphs_without_scales_have_one_key() -> None:
    """Times of float networks ship under it."""
    graph = fx.Graph()
    x, scale = graph.placeholder("x"), graph.placeholder("scale")
    kept = graph.call_function(ops.quantize, (x, scale, scale, None, 0, 255, torch.uint8))
    graph.output(graph.call_function(torch.relu, (kept,)))
    assert key(graph) == key(graph, exact=True)
