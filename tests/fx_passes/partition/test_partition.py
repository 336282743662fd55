"""Regions: maximal, convex, and in an order that keeps writes where they were."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from fx_passes import ops
from fx_passes.fuse.post_ops import fuse_post_ops
from fx_passes.graph.graph import constant_nodes, is_call, is_constant, is_shape, is_vocabulary
from fx_passes.graph.verify import verify
from fx_passes.partition.partition import find_regions, operands, ordering, partition, supported_in, worth_keeping
from fx_passes.pipeline import PlainRegion
from tests.support.graphs import check, count, image, model_of, outside, traced


def _graph(choices: list[tuple[bool, int, int]]) -> fx.GraphModule:
    """A random acyclic graph of vocabulary and plain nodes, every node an output."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x"), graph.placeholder("y")]
    for vocabulary, first, second in choices:
        a, b = nodes[first % len(nodes)], nodes[second % len(nodes)]
        nodes.append(
            graph.call_function(ops.binary, (a, b, "add")) if vocabulary else graph.call_function(torch.hypot, (a, b))
        )
    graph.output(tuple(n for n in nodes if not n.users))
    return fx.GraphModule(nn.Module(), graph)


def _reaches(start: fx.Node, stop: set[fx.Node], inside: set[fx.Node]) -> bool:
    """Whether a path that leaves `inside` at start comes back to it."""
    seen, pending = set(), [u for u in start.users if u not in inside]
    while pending:
        node = pending.pop()
        for user in node.users:
            if user in stop:
                return True
            if user not in seen:
                seen.add(user)
                pending.append(user)
    return False


CHOICES = st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=20)


@settings(max_examples=150, deadline=None)
@given(CHOICES)
def test_regions_are_convex_and_cover_the_vocabulary(choices: list[tuple[bool, int, int]]) -> None:
    gm = _graph(choices)
    regions = find_regions(gm, is_vocabulary, ordering(gm), constant_nodes(gm.graph))
    covered = [n for region in regions for n in region]
    assert sorted(map(str, covered)) == sorted(str(n) for n in gm.graph.nodes if is_vocabulary(n))
    for region in regions:
        inside = set(region)
        assert not any(_reaches(node, inside, inside) for node in region)


@settings(max_examples=150, deadline=None)
@given(CHOICES)
def test_the_graph_computes_the_same(choices: list[tuple[bool, int, int]]) -> None:
    gm = _graph(choices)
    x, y = image(3, 4), image(3, 4, seed=1)
    expected = gm(x, y)
    partition(gm, PlainRegion)
    verify(gm)
    assert not any(is_vocabulary(n) for n in gm.graph.nodes)
    torch.testing.assert_close(gm(x, y), expected)
    before = str(gm.graph)
    assert str(partition(gm, PlainRegion).graph) == before


@settings(max_examples=60, deadline=None)
@given(CHOICES)
def test_no_two_regions_could_be_one(choices: list[tuple[bool, int, int]]) -> None:
    """Maximal: where one region feeds another directly, some path between them is plain."""
    gm = _graph(choices)
    regions = find_regions(gm, is_vocabulary, ordering(gm), constant_nodes(gm.graph))
    for i, first in enumerate(regions):
        for second in regions[i + 1 :]:
            union = {*first, *second}
            assert any(_reaches(n, union, union) for n in union) or not any(u in second for n in first for u in n.users)


@given(CHOICES)
@settings(max_examples=25, deadline=None)
def test_one_walk_finds_the_constants_that_are_found_one_by_one(choices: list[tuple[bool, int, int]]) -> None:
    gm = _graph(choices)
    gm.register_parameter("weight", nn.Parameter(torch.ones(1)))
    graph, first = gm.graph, next(iter(gm.graph.nodes))
    with graph.inserting_after(first):
        read = graph.get_attr("weight")
    read.meta["constant"] = len(choices) % 2 == 0
    with graph.inserting_after(read):
        folded = graph.call_function(ops.eltwise, (read, "relu", 0.0, 0.0))
    with graph.inserting_after(folded):
        graph.call_function(ops.binary, (folded, first, "add"))
        graph.call_function(ops.binary, (folded, read, "mul"))
    found = constant_nodes(graph)
    assert found == {node for node in graph.nodes if is_constant(node)}
    assert bool(found) == read.meta["constant"]


def test_two_towers_share_a_region() -> None:
    gm = check(model_of(lambda m, x: (m.a(x), m.b(x)), a=nn.Conv2d(3, 3, 1), b=nn.Conv2d(3, 4, 1)), image())
    assert len(gm.regions()) == 1


def test_movement_alone_is_no_region_and_stays_outside_on_the_way_in() -> None:
    gm = check(model_of(lambda m, x: x.permute(0, 2, 3, 1).flatten(1)), image())
    assert not gm.regions()
    gm = check(model_of(lambda m, x: m.l(x.permute(0, 2, 3, 1)).flatten(1), l=nn.Linear(3, 2)), image())
    assert outside(gm) == {"permute": 1} and count(gm)["flatten"] == 1


def test_what_is_moved_on_the_way_in_makes_no_second_region() -> None:
    """Columns of categories, of which nothing says that they are integers, before embeddings that stay outside."""

    def forward(m: Any, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return m.l(torch.cat([m.e(categories[:, 0]), m.b(numbers), m.f(categories[:, 1])], 1))

    parts = {"e": nn.Embedding(5, 3), "f": nn.Embedding(7, 2), "b": nn.BatchNorm1d(4), "l": nn.Linear(9, 6)}
    gm = check(model_of(forward, **parts), torch.tensor([[0, 6], [4, 1]]), image(2, 4))
    assert len(gm.regions()) == 1 and {"e", "f"} <= outside(gm).keys()


def test_constants_are_inside_the_region_that_reads_them() -> None:
    model = model_of(
        lambda m, x: m.n(m.c(x)) + m.c.weight.hypot(x[0, 0, 0, 0]).sum(), c=nn.Conv2d(3, 3, 1), n=nn.BatchNorm2d(3)
    )
    gm = check(model, image())
    assert len(list(gm.graph.find_nodes(op="get_attr"))) == 1
    (region,) = [r for r in gm.regions().values() if count_in(r)["convolution"]]
    assert set(region.constants) == {"c.weight", "c.bias", "n.running_mean", "n.running_var", "n.weight", "n.bias"}
    assert region.constants["c.weight"] is gm.c.weight


def count_in(region: Any) -> dict[str, int]:
    names = [n.target.__name__ for n in region.graph.nodes if n.op == "call_function"]
    return {name: names.count(name) for name in [*names, "convolution"]}


def test_sizes_do_not_cross_borders() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.c(x)
        n, c, h, w = y.shape
        z = torch.cumsum(y, 0).reshape(n, c * h, w)
        return m.l(z).reshape(n, -1)

    gm = check(model_of(forward, c=nn.Conv2d(3, 4, 1), l=nn.Linear(7, 2)), image())
    assert len(gm.regions()) == 2
    for call in gm.graph.find_nodes(op="call_module"):
        assert not any(is_shape(source) for source in call.all_input_nodes)


def test_pieces_are_taken_apart_inside() -> None:
    gm = check(model_of(lambda m, x: torch.cumsum(m.c(x).chunk(2, 1)[1], 0), c=nn.Conv2d(3, 4, 1)), image())
    assert outside(gm) == {"cumsum": 1} and count(gm)["chunk"] == 1


def test_pieces_that_stay_together_stay_outside() -> None:
    gm = check(model_of(lambda m, x: torch.vstack(m.c(x).chunk(2, 1)), c=nn.Conv2d(3, 4, 1)), image())
    assert count(gm)["convolution"] == 1


def test_reads_and_writes_keep_their_order() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        before = m.c(x)
        seen = torch.cumsum(before, 0)
        x.mul_(2)
        after = m.c(x)
        x.add_(1)
        return before + after, m.d(x), seen

    gm = check(model_of(forward, c=nn.Conv2d(3, 3, 1), d=nn.Conv2d(3, 2, 1)), image())
    assert len(gm.regions()) >= 2


def test_sizes_are_read_on_either_side_of_a_write() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.n(x)
        x.add_(1)
        return h @ h.mT / h.shape[-1] ** 0.5

    gm = check(model_of(forward, n=nn.LayerNorm(6)), torch.randn(2, 4, 6, dtype=torch.float64))
    assert len(gm.regions()) == 1


def test_what_is_not_supported_stays_outside() -> None:
    gm = _graph([(True, 0, 1), (True, 2, 1)])
    partition(gm, PlainRegion, supported=lambda node: False)
    assert not [n for n in gm.graph.nodes if n.op == "call_module"]
    assert operator.index(len(list(gm.graph.find_nodes(op="call_function", target=ops.binary)))) == 2


def test_sizes_that_are_inputs_stay_outside() -> None:
    gm = check(model_of(lambda m, x, n: m.c(x).reshape(n, -1), c=nn.Conv2d(3, 4, 1)), image(), 4)
    assert outside(gm) == {"reshape": 1} and count(gm)["convolution"] == 1


class _Asked(frozenset[Any]):
    """A set that counts how often it is asked."""

    times = 0

    def __contains__(self, value: object) -> bool:
        self.times += 1
        return super().__contains__(value)


@pytest.mark.parametrize("heavy", [False, True])
def test_a_connected_part_is_looked_at_once(heavy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    length = 200
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(length):
        nodes.append(graph.call_function(ops.binary, (nodes[-1], nodes[-1], "add")))
        nodes[-1].meta["val"] = torch.zeros(2)
    if heavy:
        nodes.append(graph.call_function(ops.linear, (nodes[-1], nodes[0])))
        nodes[-1].meta["val"] = torch.zeros(2)
    graph.output(nodes[-1])
    needs = {node: operands(node, ()) for node in nodes}
    asked = _Asked(worth_keeping.__globals__["_HEAVY"])
    monkeypatch.setitem(worth_keeping.__globals__, "_HEAVY", asked)
    assert worth_keeping(nodes[1:], needs) == (nodes[1:] if heavy else [])
    assert asked.times <= len(nodes)


@pytest.mark.parametrize(("dtype", "regions"), [(None, 1), (torch.bfloat16, 2)], ids=str)
def test_arguments_of_periodic_functions_are_not_rounded(dtype: torch.dtype | None, regions: int) -> None:
    class Sines(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.sin(30 * self.first(x)))

    gm = fuse_post_ops(traced(Sines().eval(), torch.randn(3, 8)))
    partition(gm, PlainRegion, supported=supported_in(dtype))
    assert len(list(gm.graph.find_nodes(op="call_module"))) == regions
    assert any(is_call(node, ops.eltwise) for node in gm.graph.nodes) == (dtype is not None)
