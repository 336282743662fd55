"""Forwards that ask whether a module's result is a tuple go the way that they go in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from tests.support.graphs import model_of
from tests.support.lowering import noise
from tests.tolerance import assert_close


def last_state(m: Any, x: Tensor) -> Tensor:
    _, states = m.inner(x)
    states = states[0] if isinstance(states, tuple) else states
    result: Tensor = m.linear(states[-1])
    return result


def first_of(m: Any, x: Tensor) -> Tensor:
    found = m.inner(x)
    result: Tensor = m.linear(found[0] if isinstance(found, tuple | list) else found)
    return result


def cell(m: Any, x: Tensor) -> Tensor:
    states = None
    for _ in range(2):
        states = m.inner(x, states)
    result: Tensor = m.linear(states[0] if isinstance(states, tuple) else states)
    return result


def attention(m: Any, x: Tensor) -> Any:
    found = m.inner(x, x, x, need_weights=False)
    y, weights = found if isinstance(found, tuple) else (found, 1)
    return m.linear(y) if weights is None else -m.linear(y)


def attention_by_place(m: Any, x: Tensor) -> Any:
    found = m.inner(x, x, x, None, True)
    y, weights = found if isinstance(found, tuple) else (found, None)
    return m.linear(y) if weights is not None else -m.linear(y)


CASES: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[], nn.Module], tuple[int, ...]]] = {
    "states of an LSTM": (last_state, lambda: nn.LSTM(12, 8), (5, 3, 12)),
    "states of a GRU": (last_state, lambda: nn.GRU(12, 8), (5, 3, 12)),
    "states of an RNN": (last_state, lambda: nn.RNN(12, 8, 2), (5, 3, 12)),
    "result of an LSTM": (first_of, lambda: nn.LSTM(12, 8, bidirectional=True, proj_size=4), (5, 3, 12)),
    "LSTM cell": (cell, lambda: nn.LSTMCell(12, 8), (3, 12)),
    "attention": (attention, lambda: nn.MultiheadAttention(8, 2), (5, 3, 8)),
    "attention, by place": (attention_by_place, lambda: nn.MultiheadAttention(8, 2), (5, 3, 8)),
}


@pytest.mark.parametrize("with_example", (False, True), ids=["without example", "with example"])
@pytest.mark.parametrize("name", CASES)
def test_as_in_eager(name: str, with_example: bool) -> None:
    forward, make, shape = CASES[name]
    torch.manual_seed(0)
    model, x = model_of(forward, inner=make(), linear=nn.Linear(8, 6)).float(), noise(*shape)
    with torch.no_grad():
        expected = model(x)
        fast = zendnn_cffi.optimize(model, (x,) if with_example else None, tune="off")
        assert_close(fast(x), expected, k=64)
        assert fast.regions(), "and it is offloaded"


def test_a_hook_may_return_something_else() -> None:
    inner = nn.LSTM(12, 8)
    inner.register_forward_hook(lambda module, args, result: result[0])
    model, x = model_of(first_of, inner=inner, linear=nn.Linear(8, 6)).float(), noise(5, 3, 12)
    with torch.no_grad():
        assert_close(zendnn_cffi.optimize(model, tune="off")(x), model(x), k=64)
