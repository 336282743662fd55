"""What a forward names outside of its module, and what is changed there afterwards: calls are as in eager PyTorch."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.trace.named import Named
from fx_passes.trace.reached import Reached

SCALE = 2.0
VECTOR = torch.ones(8)
LIST = [1.0, 2.0]
UNREAD = 1.0
settings = types.SimpleNamespace(inner=types.SimpleNamespace(scale=2.0))


NESTED = {"scales": [(1.0, 2.0), [3.0]]}


class Config:
    scale = 2.0


class Variable:
    """Functions that read and write a variable of the function around them."""

    def __init__(self) -> None:
        scale, inner = 2.0, types.SimpleNamespace(scale=2.0)

        def read(y: Tensor) -> Tensor:
            return y * scale * inner.scale

        def write(value: float) -> None:
            nonlocal scale
            scale = value

        self.read, self.write, self.inner = read, write, inner


VARIABLE = Variable()


def helper(x: Tensor) -> Tensor:
    return x * SCALE


class Net(nn.Module):
    factor = 2.0

    def __init__(self, read: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(8, 8), read

    def forward(self, x: Tensor) -> Any:
        return self.read(self.linear(x))


class OfClass(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor


def set_global(name: str, value: Any) -> None:
    globals()[name] = value


# what is read, how it is changed, and how it is changed back
CASES: dict[str, tuple[Callable[[Any], Any], Callable[[], Any], Callable[[], Any]]] = {
    "number": (lambda y: y * SCALE, lambda: set_global("SCALE", 5.0), lambda: set_global("SCALE", 2.0)),
    "tensor": (lambda y: y * VECTOR, lambda: set_global("VECTOR", VECTOR * 3), lambda: set_global("VECTOR", -VECTOR)),
    "in a list": (lambda y: y * LIST[1], lambda: LIST.__setitem__(1, 7.0), lambda: LIST.__setitem__(1, 2.0)),
    "in lists of lists": (
        lambda y: y * NESTED["scales"][1][0],
        lambda: NESTED["scales"][1].__setitem__(0, 7.0),
        lambda: NESTED["scales"][1].__setitem__(0, 3.0),
    ),
    "of an enclosing function": (VARIABLE.read, lambda: VARIABLE.write(5.0), lambda: VARIABLE.write(2.0)),
    "of an object there": (
        VARIABLE.read,
        lambda: setattr(VARIABLE.inner, "scale", 9.0),
        lambda: setattr(VARIABLE.inner, "scale", 2.0),
    ),
    "of a class": (
        lambda y: y * Config.scale,
        lambda: setattr(Config, "scale", 9.0),
        lambda: setattr(Config, "scale", 2.0),
    ),
    "of an object": (
        lambda y: y * settings.inner.scale,
        lambda: setattr(settings.inner, "scale", 9.0),
        lambda: setattr(settings.inner, "scale", 2.0),
    ),
    "by globals()": (
        lambda y: y * globals()["SCALE"],
        lambda: set_global("SCALE", 5.0),
        lambda: set_global("SCALE", 2.0),
    ),
    "in text": (lambda y: y * eval("SCALE"), lambda: set_global("SCALE", 5.0), lambda: set_global("SCALE", 2.0)),
    "in a helper": (lambda y: helper(y), lambda: set_global("SCALE", 5.0), lambda: set_global("SCALE", 2.0)),
    "of the module's class": (lambda y: y, lambda: setattr(Net, "factor", 4.0), lambda: setattr(Net, "factor", 2.0)),
}  # fmt: skip


@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_is_changed_afterwards_counts(name: str, with_example: bool) -> None:
    read, change, back = CASES[name]
    model = (OfClass() if name == "of the module's class" else Net(read)).eval()
    x = torch.randn(3, 8)
    fast = zendnn_cffi.optimize(model, (x,) if with_example else None, tune="off")
    assert fast.regions()
    with torch.no_grad():
        for act in (lambda: None, change, lambda: None, back):
            act()
            torch.testing.assert_close(fast(x), model(x))
    assert fast._source[0].arrange((x,), {}) is not None or name == "tensor"  # another object is another tensor


def test_other_names_do_not_count() -> None:
    model = Net(CASES["number"][0]).eval()
    named = Named.of(model, Reached(model))
    assert named is not None and named.unchanged()
    set_global("UNREAD", UNREAD + 1)
    set_global("linear", 3)  # the name of an attribute
    set_global("SCALE", float("2.0"))
    assert named.unchanged()
    set_global("SCALE", 3.0)
    assert not named.unchanged()
    set_global("SCALE", 2.0)
    assert named.unchanged()


def test_installed_libraries_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    assert Named.of(model, Reached(model)) is None


def test_a_list_that_holds_itself_is_not_followed() -> None:
    LIST.append(LIST)
    try:
        model = Net(CASES["in a list"][0]).eval()
        assert Named.of(model, Reached(model)) is not None
    finally:
        LIST.pop()


@pytest.mark.parametrize("with_example", [False, True])
def test_copies_and_pickles(with_example: bool) -> None:
    model, x = OfClass().eval(), torch.randn(2, 8)
    fast = zendnn_cffi.optimize(model, (x,) if with_example else None, tune="off")
    written = pickle.dumps(fast)
    copies = [copy.deepcopy(fast), pickle.loads(written)]
    try:
        for value in (2.0, 4.0):  # what is changed after copying, and before
            Net.factor = value
            for other in (*copies, pickle.loads(written)):
                torch.testing.assert_close(other(x), model(x))
        Net.factor = 2.0
        assert all(other._source[0].arrange((x,), {}) is not None for other in (*copies, pickle.loads(written)))
    finally:
        Net.factor = 2.0
