"""Layout assignment: exact where it says so, and reorders no more than needed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from fx_passes.candidates.candidates import Candidate, Operation, PrimitiveTemplate, TorchTemplate, Weights
from fx_passes.candidates.layouts import layout
from fx_passes.candidates.specs import TensorSpec
from fx_passes.layout import assign
from fx_passes.layout.assign import Table, assign_layouts, minimise
from zendnn_cffi.primitives.memory import MemoryDesc

SHAPE = (1, 32, 4, 4)  # two blocks of 16: all three layouts are other bytes
LAYOUTS = [layout(SHAPE, torch.float32, tag) for tag in ("nhwc", "nChw16c", "nchw")]
CALL = (TorchTemplate(lambda *t: t[0], ""),)


def total(tables: Sequence[Table], choice: Sequence[int]) -> float:
    """What a choice costs."""
    return sum(float(costs[tuple(choice[v] for v in scope)]) for scope, costs in tables)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Table], list[int]]:
    """Variables with tables over one, two or three of them, in any order."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    scopes = st.lists(st.sampled_from(range(len(sizes))), min_size=1, max_size=3, unique=True).map(tuple)
    tables = []
    for scope in draw(st.lists(scopes, max_size=8)):
        shape = [sizes[v] for v in scope]
        costs = draw(st.lists(st.integers(0, 9), min_size=math.prod(shape), max_size=math.prod(shape)))
        tables.append((scope, np.array(costs, dtype=float).reshape(shape)))
    return tables, sizes


@settings(max_examples=150, deadline=None)
@given(problems())
def test_minimise_equals_brute_force(problem: tuple[list[Table], list[int]]) -> None:
    tables, sizes = problem
    choice = minimise(tables, sizes)
    assert len(choice) == len(sizes) and all(0 <= c < n for c, n in zip(choice, sizes, strict=True))
    assert total(tables, choice) == min(total(tables, c) for c in itertools.product(*map(range, sizes)))


def test_a_value_with_a_hundred_readers() -> None:
    """Each has one state, as most of vit_h_14's do: if they counted, a joint table had more axes than numpy allows."""
    tables: list[Table] = [((0,), np.array([1.0, 3.0, 2.0]))]
    for reader in range(1, 101):
        costs = [[0.2], [0.0], [0.1]]
        tables.append(((0, reader), np.array(costs)) if reader % 2 else ((reader, 0), np.array(costs).T))
    sizes = [3] + [1] * 100
    assert minimise(tables, sizes) == [1] + [0] * 100
    assert minimise([((0, 1), np.array([[4.0]]))], [1, 1]) == [0, 0]


@settings(max_examples=50, deadline=None)
@given(problems())
def test_descent_is_legal_and_no_worse_than_a_uniform_choice(problem: tuple[list[Table], list[int]]) -> None:
    tables, sizes = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assign, "MAX_TABLE", 1)
        choice = minimise(tables, sizes)
    assert all(0 <= c < n for c, n in zip(choice, sizes, strict=True))
    for start in range(max(sizes)):
        assert total(tables, choice) <= total(tables, [min(start, n - 1) for n in sizes])


def test_a_long_chain_is_quick_and_exact() -> None:
    rng = np.random.default_rng(0)
    sizes = [4] * 300
    tables: list[Table] = [((i, i + 1), rng.integers(0, 100, (4, 4)).astype(float)) for i in range(299)]
    best = np.zeros(4)
    for _, costs in tables:
        best = (best[:, None] + costs).min(axis=0)
    assert total(tables, minimise(tables, sizes)) == best.min()


class Problem:
    """Operations over one shape, each with candidates named by their layouts."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.input = self.graph.placeholder("x")
        self.operations: list[Operation] = []

    def add(self, operands: Sequence[fx.Node], candidates: Sequence[tuple[int, int, float]]) -> fx.Node:
        """An operation that takes all operands in one layout and leaves another, at a cost."""
        node = self.graph.call_function(len, tuple(operands))
        made = [Candidate(f"{s}->{d}", (LAYOUTS[s],) * len(operands), LAYOUTS[d], CALL, cost_ns=c)
                for s, d, c in candidates]  # fmt: skip
        spec = TensorSpec(SHAPE, torch.float32, (512, 16, 4, 1))
        self.operations.append(Operation(node, node.name, "test", tuple(operands), spec, made))
        return node

    def solve(self, leaves: fx.Node, reorder_ns: float = 10.0, wanted: int = 2) -> tuple[list[str], float]:
        chosen = assign_layouts(
            self.operations, {self.input: LAYOUTS[2]}, {leaves: LAYOUTS[wanted]}, lambda a, b: reorder_ns
        )
        return [c.implementation for c in chosen], self.cost(chosen, leaves, reorder_ns, wanted)

    def cost(self, chosen: Sequence[Candidate], leaves: fx.Node, reorder_ns: float, wanted: int) -> float:
        """What the choice costs when every value is reordered once per layout that is asked for."""
        have: dict[fx.Node, MemoryDesc] = {self.input: LAYOUTS[2]}
        asked: set[tuple[fx.Node, MemoryDesc]] = {(leaves, LAYOUTS[wanted])}
        price = 0.0
        for operation, candidate in zip(self.operations, chosen, strict=True):
            have[operation.node] = candidate.dst
            price += candidate.cost_ns
            asked |= set(zip(operation.operands, candidate.srcs, strict=True))
        return price + reorder_ns * sum(have[node] != want for node, want in asked)


ANY = [(i, i, 1.0) for i in range(3)]


def test_layouts_follow_the_reorders_they_save() -> None:
    """A faster kernel in another layout is chosen when it pays for two reorders, and only then."""
    for gain, expected in ((15.0, "2->2"), (25.0, "1->1")):
        problem = Problem()
        a = problem.add([problem.input], ANY)
        b = problem.add([a], [(2, 2, 30.0), (1, 1, 30.0 - gain)])
        c = problem.add([b], ANY)
        names, _ = problem.solve(c)
        assert names[1] == expected


def test_a_reorder_that_readers_share_counts_once() -> None:
    problem = Problem()
    a = problem.add([problem.input], [(2, 2, 1.0)])
    readers = [problem.add([a], [(0, 2, 1.0), (2, 2, 5.0)]) for _ in range(4)]
    last = problem.add(readers, [(2, 2, 1.0)])
    names, cost = problem.solve(last)  # 4 readers save 4 each: together more than one reorder, alone less
    assert names[1:5] == ["0->2"] * 4 and cost == 1 + 10 + 4 + 1


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Problem, fx.Node]:
    """Random graphs of up to five operations."""
    problem = Problem()
    nodes = [problem.input]
    for _ in range(draw(st.integers(1, 5))):
        operands = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=2))
        every = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 30).map(float))
        nodes.append(problem.add(operands, draw(st.lists(every, min_size=1, max_size=3))))
    return problem, nodes[-1]


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(0, 2))
def test_assignment_is_the_cheapest_of_all(drawn: tuple[Problem, fx.Node], wanted: int) -> None:
    problem, leaves = drawn
    _, cost = problem.solve(leaves, wanted=wanted)
    every = itertools.product(*(operation.candidates for operation in problem.operations))
    assert cost == min(problem.cost(chosen, leaves, 10.0, wanted) for chosen in every)


def test_a_pair_of_layouts_is_priced_once() -> None:
    """In a dense block each value is read by all that follow: 6,591 questions for DenseNet-121, 397 pairs."""
    problem, asked = Problem(), []
    read = [problem.input]
    for _ in range(6):
        read.append(problem.add(read, [(0, 0, 5.0), (1, 1, 5.0), (2, 0, 9.0)]))

    def price(have: Any, want: Any) -> float:
        asked.append((have, want))
        return 10.0

    assign_layouts(problem.operations, {problem.input: LAYOUTS[2]}, {read[-1]: LAYOUTS[1]}, price)
    assert len(asked) == len(set(asked)) <= 6


def test_a_call_into_pytorch_costs_more_than_its_time() -> None:
    """Between kernels its code is in no cache: 15 us are added where candidates are chosen."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    desc = layout((4,), torch.float32, "a")
    pd: Any = None
    kernel = Candidate("kernel", (), desc, (PrimitiveTemplate(pd, {}, "eltwise"),), cost_ns=20e3)
    for cost_ns, chosen in ((4e3, "torch"), (6e3, "kernel")):
        plain = Candidate("torch", (), desc, (TorchTemplate(torch.relu, "", key="relu"),), cost_ns=cost_ns)
        operation = Operation(node, "y", "eltwise", (), TensorSpec((4,), torch.float32, (1,)), [plain, kernel])
        (found,) = assign_layouts([operation], {}, {}, lambda have, want: 0.0)
        assert found.implementation == chosen


@pytest.mark.parametrize(("bytes_of_one", "chosen"), [(9 << 20, "less to read"), (1 << 20, "faster alone")])
def test_large_weights_cost_what_reading_them_takes(bytes_of_one: int, chosen: str) -> None:
    """Alone they are in a cache, in a network they come from memory: of small ones nothing is said."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    desc = layout((4,), torch.float32, "a")
    pd: Any = None

    def kernel(name: str, size_bytes: int, cost_ns: float) -> Candidate:
        weights = Weights("w", torch.empty(0), layout((size_bytes // 4,), torch.float32, "a"))
        return Candidate(name, (), desc, (PrimitiveTemplate(pd, {1: weights}, "convolution"),), cost_ns=cost_ns)

    offered = [kernel("faster alone", bytes_of_one, 330e3), kernel("less to read", bytes_of_one // 2, 380e3)]
    operation = Operation(node, "y", "convolution", (), TensorSpec((4,), torch.float32, (1,)), offered)
    (found,) = assign_layouts([operation], {}, {}, lambda have, want: 0.0)
    assert found.implementation == chosen
