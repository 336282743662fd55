"""The module that remembers results: by what it is called with, and which results are too large to keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fx_passes import ops
from fx_passes.memoize.masks import kind_of
from fx_passes.memoize.memoised import Memoised, find_members, move_into_module

aten = torch.ops.aten


class Counting(Memoised):
    """Counts its runs."""

    runs = 0

    def _compute(self, given: tuple[Any, ...]) -> tuple[Tensor, ...]:
        self.runs += 1
        return super()._compute(given)


def memoised(function: Callable[..., Tensor], masks: int = 0, **constants: Tensor) -> Counting:
    """A module that computes (function(argument, *constants),)."""
    graph = fx.Graph()
    arguments = (graph.placeholder("x"), *(graph.get_attr(name) for name in constants))
    graph.output((graph.call_function(function, arguments),))
    return Counting(graph, constants, masks)


def test_by_size() -> None:
    module = memoised(lambda n: torch.ones(4, 4)[:, :n] * 2)
    first = module(3)
    assert module(3) is first and module(2)[0].shape == (4, 2) and module.runs == 2


def test_what_was_computed_before_a_change_is_not_kept_after_it() -> None:
    """A thread that was held up brought the old numbers back, for good."""
    module = memoised(lambda n, table: table[:n] * 2, table=torch.ones(4))
    compute = module._compute

    def held_up(given: tuple[Any, ...]) -> tuple[Tensor, ...]:
        results = compute(given)
        module.forget()  # as another thread does, which saw the change
        return results

    module._compute = held_up  # type: ignore[method-assign]
    assert module(3)[0].tolist() == [2, 2, 2] and module.kept == 0
    module._compute = compute  # type: ignore[method-assign]
    module.constants["table"].fill_(5)
    assert module(3)[0].tolist() == [10, 10, 10] and module.kept == 1


def test_by_what_a_mask_says() -> None:
    module = memoised(lambda mask: mask.bool()[:, None], masks=1)
    mask = torch.tensor([[1, 0]])
    first = module(mask)
    assert module(mask.clone()) is first and module.runs == 1
    mask[0, 1] = 1  # the copy that was kept is another
    assert bool(module(mask)[0].all()) and module.runs == 2
    assert module(torch.ones(2, 2))[0].shape == (2, 1, 2) and module.kept == 2


@pytest.mark.parametrize("masks", (0, 1))
def test_large_results_are_computed_each_time(masks: int) -> None:
    module = memoised(lambda x: torch.zeros(5_000_000 if masks else 40_000_000) + x, masks)
    for _ in range(2):
        module(torch.ones(1) if masks else 1)
    assert module.runs == 2 and module.kept == 0


def test_views_of_large_tensors_are_small() -> None:
    """A slice of a table counts as what it shows; a repeated row as what there is."""
    module = memoised(lambda n, table: table[:n], table=torch.zeros(20_000_000))
    assert module(3) is module(3)
    module = memoised(lambda n, row: row.expand(20_000_000, n), row=torch.zeros(4))
    assert module(4) is module(4)


def test_a_parameter_that_is_trained_is_read_each_time() -> None:
    table = nn.Parameter(torch.ones(4))
    module = memoised(lambda n, table: table[:n] * 2, table=table.detach())
    module.constants = {"table": table}
    assert module(2)[0].requires_grad and module(2)[0].requires_grad and module.runs == 2
    with torch.no_grad():
        assert module(2) is module(2)
    assert module(2)[0].requires_grad


def test_results_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of what comes later says the same in each call."""
    (later,) = memoised(lambda n: torch.ones(4, 4, dtype=torch.bool)[:n, :n].tril())(3)
    assert kind_of(later) == "causal"
    monkeypatch.setattr("fx_passes.memoize.masks.describe", None)
    assert kind_of(later) == "causal"


def test_who_traces_gets_it_computed() -> None:
    module = memoised(lambda n: torch.ones(4)[:n])
    module(3)
    with torch._subclasses.FakeTensorMode():
        module(3)
    assert module.runs == 2 and module.kept == 1


def _graph() -> dict[str, fx.Node]:
    """mask -> wide -> shown; and what is returned, or made of something else."""
    graph = fx.Graph()
    aten, value = torch.ops.aten, torch.zeros(2, 2)
    mask, other = graph.placeholder("mask"), graph.placeholder("other")
    wide = graph.call_function(aten.mul.Tensor, (mask, 2))
    shown = graph.call_function(aten.neg.default, (wide,))
    sum_ = graph.call_function(aten.add.Tensor, (wide, other))
    made = graph.call_function(aten.ones.default, ([2, 2],))
    seen = graph.call_function(aten.neg.default, (made,))
    back = graph.call_function(aten.add.Tensor, (shown, seen))
    graph.output((sum_, back))
    for node in (mask, other, wide, shown, sum_, made, seen, back):
        node.meta["val"] = value
    return {"mask": mask, "wide": wide, "shown": shown, "made": made, "seen": seen}


@pytest.mark.parametrize(("masked", "expected"), ((False, ("made", "seen")), (True, ("wide", "shown"))))
def test_members(masked: bool, expected: tuple[str, ...]) -> None:
    """What reads another input is none, nor what the caller gets."""
    nodes = _graph()
    gm = fx.GraphModule(nn.Module(), nodes["mask"].graph)
    found = find_members(gm, lambda node: False, [nodes["mask"]] if masked else None)
    assert found == [nodes[name] for name in expected]


def test_a_size_of_a_result_is_no_argument_of_what_computes_it() -> None:
    """The length of a prompt and a text, of which a mask is made: it is known after the prompt was computed."""
    graph = fx.Graph()
    ids = graph.placeholder("ids")
    ids.meta["val"] = torch.zeros(2, 4, dtype=torch.int64)

    def call(target: Any, *arguments: Any) -> fx.Node:
        node = graph.call_function(target, arguments)
        values = fx.node.map_arg(arguments, lambda source: source.meta["val"])
        node.meta["val"] = target(*values)
        return node

    prompt = call(aten.repeat.default, call(aten.arange.default, 3), [call(ops.size, ids, 0), 1])
    both = call(ops.concat, (prompt, ids), 1)
    numbers = call(aten.arange.default, call(ops.size, both, 1))
    graph.output((both, call(aten.mul.Tensor, numbers, 2)))
    gm = fx.GraphModule(nn.Module(), graph)
    found = find_members(gm, lambda node: False)
    assert found == [prompt.args[0], prompt]
    move_into_module(gm, found, "per_size", gm)
    expected = torch.cat([torch.arange(3).expand(2, 3), torch.ones(2, 4, dtype=torch.int64)], 1)
    torch.testing.assert_close(gm(torch.ones(2, 4, dtype=torch.int64)), (expected, 2 * torch.arange(7)))
