"""Choices by the time inside the network: what is replaced, what is kept, and that it is remembered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.candidates.candidates import Candidate, Operation
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.layout.assign import assign_layouts
from fx_passes.lower.context import eager_layout
from fx_passes.lower.rules import lower_graph
from fx_passes.plan.prepack import WeightStore
from fx_passes.plan.schedule import build_program
from fx_passes.search import refine
from fx_passes.search.database import Database
from fx_passes.search.turn import Turn
from tests.support.lowering import net, noise
from zendnn_cffi.runtime.program import Program

SHAPE = (1, 32, 14, 14)
Times = list[list[list[int]]]


class Region:
    """Two convolutions, all of whose candidates are equally fast alone."""

    def __init__(self, folder: Path) -> None:
        graph = fx.Graph()
        value = graph.placeholder("x")
        self.weights = {f"w{i}": noise(32, 32, 3, 3) for i in range(2)}
        for name in self.weights:
            value = graph.call_function(ops.convolution, (value, graph.get_attr(name)), {
                "stride": (1, 1), "padding_l": (1, 1), "padding_r": (1, 1), "dilation": (1, 1), "groups": 1,
                "post_ops": ()})  # fmt: skip
        graph.output(value)
        self.inputs = [TensorSpec.of(torch.empty(SHAPE))]
        self.operations: list[Operation]
        self.values: RegionValues
        self.operations, self.values = lower_graph(graph, self.inputs, self.weights)
        for operation in self.operations:
            operation.candidates = [replace(c, cost_ns=100.0) for c in operation.candidates]
        specs = self.values.specs
        self.arriving = {node: eager_layout(specs[node]) for node in graph.find_nodes(op="placeholder")}
        self.leaving = [(value, specs[value])]
        wanted = {value: eager_layout(specs[value])}
        self.choice = assign_layouts(self.operations, self.arriving, wanted, lambda have, want: 1.0)
        self.folder = folder

    def build(self, choice: Sequence[Candidate]) -> Program:
        return build_program(self.operations, choice, self.arriving, self.leaving, WeightStore())

    def refine(self) -> list[Candidate]:
        return refine.refine(
            self.operations, self.choice, self.inputs, self.build, Turn(Database("test", self.folder), 1), "region"
        )

    def run(self, choice: Sequence[Candidate], x: torch.Tensor) -> torch.Tensor:
        return self.build(choice)([x])[0]


@pytest.fixture
def region(tmp_path: Path) -> Region:
    return Region(tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """clock(times of the k-th programs' calls, totals before and after): the clock from now on, in ns.

    Returns a list that will hold the number of programs of each measurement.
    """

    def replace_it(times: Sequence[int], whole: tuple[int, int] = (2, 1)) -> list[int]:
        measured: list[int] = []

        def take_turns(programs: Sequence[Program], inputs: Sequence[torch.Tensor]) -> Times:
            measured.append(len(programs))
            each = whole if len(measured) % 2 == 0 else times[: len(programs)]
            return [[[ns] * len(p.calls)] * 3 for p, ns in zip(programs, each, strict=True)]

        monkeypatch.setattr(refine, "_take_turns", take_turns)
        return measured

    return replace_it


def test_what_is_faster_inside_is_used(region: Region, clock: Callable[..., list[int]]) -> None:
    measured = clock([100, 50, 70])
    refined = region.refine()
    assert measured == [3, 2]
    for before, after in zip(region.choice, refined, strict=True):
        assert after is not before and after.implementation != before.implementation
        assert (after.srcs, after.dst, after.overwrites) == (before.srcs, before.dst, before.overwrites)
    x = noise(*SHAPE)
    expected = F.conv2d(F.conv2d(x, region.weights["w0"], padding=1), region.weights["w1"], padding=1)
    error = (region.run(refined, x) - expected).abs().max() / expected.abs().max()
    assert error < 2e-5


@pytest.mark.parametrize(
    ("times", "whole"),
    [
        pytest.param([100, 50, 70], (1, 2), id="the whole is slower"),
        pytest.param([100, 50, 70], (1, 1), id="the whole is no faster"),
        pytest.param([100, 98, 99], (2, 1), id="within noise"),
        pytest.param([100, 150, 120], (2, 1), id="slower"),
    ],
)
def test_without_a_clear_gain_nothing_changes(
    times: list[int], whole: tuple[int, int], region: Region, clock: Callable[..., list[int]]
) -> None:
    measured = clock(times, whole)
    refined = region.refine()
    assert measured == [3, 2]
    assert all(after is before for before, after in zip(region.choice, refined, strict=True))


@pytest.mark.parametrize(("second", "replaced"), [(80, True), (180, False)])
def test_operations_of_equal_work_choose_together(
    second: int, replaced: bool, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second alternative takes 50 in one place and `second` in the other, the first 100 in both."""
    rounds: list[int] = []

    def take_turns(programs: Sequence[Program], inputs: Sequence[torch.Tensor]) -> Times:
        rounds.append(len(programs))
        if len(rounds) == 2:
            return [[[2] * len(programs[0].calls)] * 3, [[1] * len(programs[1].calls)] * 3]
        names = [operation.name for operation in region.operations]
        table = {(1, names[0]): 50, (1, names[1]): second}
        return [[[table.get((k, call.name), 100) for call in p.calls]] * 3 for k, p in enumerate(programs)]

    monkeypatch.setattr(refine, "_take_turns", take_turns)
    refined = region.refine()
    assert [a is not b for a, b in zip(refined, region.choice, strict=True)] == [replaced] * 2


def test_it_is_remembered(region: Region, clock: Callable[..., list[int]]) -> None:
    measured = clock([100, 70, 50])
    database = Database("test", region.folder)
    arguments = region.operations, region.choice, region.inputs, region.build
    with Turn(database, 1) as turn:
        first = refine.refine(*arguments, turn, "region")
    del measured[:]
    assert refine.refine(*arguments, Turn(database, 1), "region") == first
    database.save()
    assert refine.refine(*arguments, Turn(Database("test", region.folder), 1), "region") == first, "from the file"
    assert measured == []
    with Turn(database, 1) as turn:
        refine.refine(*arguments, turn, "another region")
    assert measured == [3, 2]


def test_without_leave_the_choice_stays(region: Region, clock: Callable[..., list[int]]) -> None:
    measured = clock([100, 70, 50])
    turn = Turn(Database("test", region.folder), 1, seconds=0.0)
    arguments = region.operations, region.choice, region.inputs, region.build
    assert refine.refine(*arguments, turn, "region") == region.choice
    assert measured == [] and turn.left_out == 1


@pytest.mark.parametrize(("seconds", "cost_ns"), [(1.0, 1e8), (1.0, 1e6), (math.inf, 1e8)], ids=str)
def test_a_call_of_long_runs_leaves_it_for_later(
    seconds: float, cost_ns: float, region: Region, clock: Callable[..., list[int]]
) -> None:
    """Two operations of 0.1 s take 4 s in twenty runs; a thread of its own has that time."""
    measured = clock([100, 70, 50])
    for operation in region.operations:
        operation.candidates = [replace(c, cost_ns=cost_ns) for c in operation.candidates]
    choice = [operation.candidates[0] for operation in region.operations]
    with Turn(Database("test", region.folder), 1, seconds=seconds) as turn:
        found = refine.refine(region.operations, choice, region.inputs, region.build, turn, "region")
    is_left = math.isfinite(seconds) and cost_ns > 1e7
    assert (found == choice, bool(measured), turn.left_out) == (is_left, not is_left, int(is_left))


def test_a_single_choice_is_not_measured(region: Region, clock: Callable[..., list[int]]) -> None:
    measured = clock([100])
    for operation, candidate in zip(region.operations, region.choice, strict=True):
        others = [replace(c, cost_ns=151.0) for c in operation.candidates if c is not candidate]
        operation.candidates = [candidate, *others]
    assert region.refine() == region.choice
    assert measured == []


@pytest.mark.needs("avx512")
@pytest.mark.parametrize(("rows", "tried"), [(1, True), (7, True), (64, False)])
def test_products_of_few_rows_try_every_implementation(rows: int, tried: bool) -> None:
    graph = fx.Graph()
    product = graph.call_function(ops.linear, (graph.placeholder("x"), graph.get_attr("w")))
    graph.output(product)
    (operation,), _ = lower_graph(graph, [TensorSpec.of(torch.empty(rows, 64))], {"w": noise(48, 64)})
    assert len(operation.candidates) > 3
    chosen, *others = operation.candidates = [
        replace(c, cost_ns=100.0 if i == 0 else 900.0) for i, c in enumerate(operation.candidates)
    ]
    assert refine._alternatives(operation, chosen) == [chosen, *(others if tried else [])]


def test_the_real_clock_times_every_call(region: Region) -> None:
    program = region.build(region.choice)
    ((*rounds,),) = refine._take_turns([program], [noise(*SHAPE)])
    assert len(rounds) >= 3
    assert all(len(calls) == len(program.calls) and min(calls) > 0 for calls in rounds)
    by_operation = refine._by_operation(program, rounds)
    assert {o.name for o in region.operations} <= set(by_operation)


@pytest.mark.parametrize("tune", ("auto", "full", "off"))
def test_optimize_refines_where_it_measures(tune: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    real = refine.refine
    monkeypatch.setattr("fx_passes.region.compile.refine", lambda *a: called.append(a[-1]) or real(*a))
    model, x = net(lambda m, x: F.relu(m[0](x)), nn.Conv2d(32, 32, 3, padding=1)), noise(2, 32, 9, 9)
    gm = zendnn_cffi.optimize(model, tune=tune)
    torch.testing.assert_close(gm(x), model(x), rtol=1e-4, atol=1e-4)
    assert bool(called) == (tune != "off")
