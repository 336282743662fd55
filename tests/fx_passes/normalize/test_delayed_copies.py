"""Copies into inputs: which wait for the end of the graph, and whether all is as eager leaves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.normalize.delayed_copies import delay_copies
from tests.support.graphs import after, check_twice

Update = Callable[[Tensor, Tensor], Any]


def read_after(state: Tensor, new: Tensor) -> Tensor:
    state.copy_(new)
    return state


def result_read(state: Tensor, new: Tensor) -> Tensor:
    return state.copy_(new)


def not_read(state: Tensor, new: Tensor) -> Tensor:
    state.copy_(new[:1])
    return new


def view_read(state: Tensor, new: Tensor) -> Tensor:
    state.copy_(new)
    return state.transpose(0, 1).flatten().view(2, 4)


def read_before(state: Tensor, new: Tensor) -> Tensor:
    before = state * 2
    state.copy_(new)
    return before + state


def view_made_before(state: Tensor, new: Tensor) -> Tensor:
    seen = state[1:]
    state.copy_(new)
    return new + seen.sum(0)


def other_strides(state: Tensor, new: Tensor) -> Tensor:
    state.copy_(new.t().contiguous().t())
    return state.view(-1).view(2, 4)


def broadcast(state: Tensor, new: Tensor) -> Tensor:
    state.copy_(new[:1])
    return state


def converted(state: Tensor, new: Tensor) -> Tensor:
    state.copy_(new.double() / 3)
    return state


def written_again(state: Tensor, new: Tensor) -> Tensor:
    state.copy_(new)
    state.mul_(2)
    return state


def copied_is_written(state: Tensor, new: Tensor) -> Tensor:
    state.copy_(new)
    new.mul_(2)
    return state


def a_part(state: Tensor, new: Tensor) -> Tensor:
    state[1:].copy_(new[1:])
    return state


def own_view(state: Tensor, new: Tensor) -> Tensor:
    state.copy_(state.flip(0) + new)
    return state


RECOGNISED = {f.__name__: f for f in (read_after, result_read, not_read, view_read, read_before, own_view)}
MISSES = {
    f.__name__: f
    for f in (
        view_made_before, other_strides, broadcast, converted, written_again, copied_is_written, a_part,
    )
}  # fmt: skip


class Model(nn.Module):
    """x [2, 4] and a state [2, 4], which is written to between two layers."""

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.update = update
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if x.shape[0] > 99:  # a condition: torch.export follows it, symbolic tracing does not
            x = x * 1
        new = self.first(x)
        return self.last(self.update(state, new)), state


def state(seed: int = 0) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))


def is_delayed(update: Update) -> bool:
    """Whether the copy comes behind the last layer."""
    gm = after("normalize", Model(update).eval(), (state(1), state()))
    names = [str(node.target) for node in gm.graph.nodes]
    copies = [place for place, name in enumerate(names) if "copy_" in name and "contiguous" not in name]
    return len(copies) == 1 and not any("linear" in name for name in names[copies[0] :])


@pytest.mark.parametrize("update", RECOGNISED)
def test_waits(update: str) -> None:
    assert is_delayed(RECOGNISED[update])


@pytest.mark.parametrize("update", MISSES)
def test_stays(update: str) -> None:
    assert not is_delayed(MISSES[update])


@pytest.mark.parametrize("update", RECOGNISED | MISSES)
@pytest.mark.parametrize("by_compile", [False, True])
def test_equals_eager(update: str, by_compile: bool) -> None:
    model = Model((RECOGNISED | MISSES)[update]).eval()
    if by_compile:
        fast: Any = torch.compile(model, backend="zendnn", options={"tune": "off"})
    else:
        fast = zendnn_cffi.optimize(model, (state(1), state()), tune="off")
    mine, theirs = state(), state()
    for step in range(3):
        x = state(step + 2)
        with torch.no_grad():
            actual, expected = fast(x, mine), model(x, theirs)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        assert actual[1] is mine, "the state that is returned is the state that was given"


def test_a_view_that_is_returned_shares_memory() -> None:
    class Returned(Model):
        def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            if x.shape[0] > 99:
                x = x * 1
            state.copy_(self.first(x))
            return self.last(state), state[1:]

    model = Returned(read_after).eval()
    fast = zendnn_cffi.optimize(model, (state(1), state()), tune="off")
    mine = state()
    with torch.no_grad():
        assert fast(state(2), mine)[1].data_ptr() == mine[1:].data_ptr()


def test_buffers() -> None:
    class Counting(nn.Module):
        total: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("total", torch.zeros(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] > 99:
                x = x * 1
            self.total.copy_(self.total + self.first(x))
            return self.last(self.total)

    model, other = Counting().eval(), Counting().eval()
    other.load_state_dict(model.state_dict())
    fast = zendnn_cffi.optimize(model, (state(),), tune="off")
    for step in range(3):
        with torch.no_grad():
            torch.testing.assert_close(fast(state(step)), other(state(step)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast.get_buffer("total"), other.total, rtol=1e-5, atol=1e-5)


def test_a_second_time_nothing_is_left_to_do() -> None:
    check_twice(after("delay_copies", Model(read_after).eval(), (state(1), state())), delay_copies)
