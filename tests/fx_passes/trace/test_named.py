"""What a forward names outside of its module, and what is changed there afterwards: calls are as in eager PyTorch."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import math
import pickle
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.trace.named import Named
from fx_passes.trace.reached import Reached

SCALE = 2.0
VECTOR = torch.ones(8)
LIST = [1.0, 2.0]
WRITTEN = torch.tensor(2.0)
WRITTEN_LIST = [torch.tensor(2.0)]
UNREAD = 1.0
SIGNED = 0.0
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


@dataclasses.dataclass(slots=True)
class Slots:
    scale: float = 2.0
    unread: float = 1.0


class Plain:
    def __init__(self) -> None:
        self.scale, self.unread = 2.0, 1.0


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


MODE, ACT, CHOSEN, SLOTS = Mode.FAST, torch.relu, {1}, Slots()
PARTIAL = functools.partial(torch.mul, other=2.0)
OBJECT, OBJECTS, ARRAY = Plain(), {"a": types.SimpleNamespace(scale=2.0)}, numpy.ones(2)
STEPS = {"mul": 2.0, "add": 1.0}
ORDERED = collections.OrderedDict(STEPS)
FORMER = {"ACT": ACT, "PARTIAL": PARTIAL, "OBJECT": OBJECT}


def of_local(y: Tensor) -> Tensor:
    config = OBJECT
    return y * config.scale


def of_argument(y: Tensor, config: Any) -> Tensor:
    return y * config.scale


def by_steps(y: Tensor, steps: dict[str, float]) -> Tensor:
    for name, value in steps.items():
        y = y * value if name == "mul" else y + value
    return y


def to_end(steps: dict[str, float], name: str) -> None:
    steps[name] = steps.pop(name)


def helper(x: Tensor) -> Tensor:
    return x * SCALE


class Net(nn.Module):
    factor = 2.0
    config = types.SimpleNamespace(scale=2.0)

    def __init__(self, read: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(8, 8), read

    def forward(self, x: Tensor) -> Any:
        return self.read(self.linear(x))


class OfClass(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor * self.config.scale


def set_global(name: str, value: Any) -> None:
    globals()[name] = value


# what is read, how it is changed, and how it is changed back
CASES: dict[str, tuple[Callable[[Any], Any], Callable[[], Any], Callable[[], Any]]] = {
    "number": (lambda y: y * SCALE, lambda: set_global("SCALE", 5.0), lambda: set_global("SCALE", 2.0)),
    "sign of zero": (
        lambda y: y * math.copysign(1.0, SIGNED),
        lambda: set_global("SIGNED", -0.0),
        lambda: set_global("SIGNED", 0.0),
    ),
    "tensor": (lambda y: y * VECTOR, lambda: set_global("VECTOR", VECTOR * 3), lambda: set_global("VECTOR", -VECTOR)),
    "numbers of a tensor": (lambda y: y * WRITTEN, lambda: WRITTEN.fill_(5.0), lambda: WRITTEN.fill_(2.0)),
    "numbers computed of": (lambda y: y * (WRITTEN * 2), lambda: WRITTEN.fill_(5.0), lambda: WRITTEN.fill_(2.0)),
    "numbers told": (lambda y: y * WRITTEN.item(), lambda: WRITTEN.fill_(5.0), lambda: WRITTEN.fill_(2.0)),
    "numbers in a list": (
        lambda y: y * (WRITTEN_LIST[0] * 2),
        lambda: WRITTEN_LIST[0].fill_(5.0),
        lambda: WRITTEN_LIST[0].fill_(2.0),
    ),
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
    "an object": (
        lambda y: y * OBJECT.scale,
        lambda: set_global("OBJECT", types.SimpleNamespace(scale=9.0)),
        lambda: set_global("OBJECT", FORMER["OBJECT"]),
    ),
    "a function of C code": (
        lambda y: ACT(y),
        lambda: set_global("ACT", torch.tanh),
        lambda: set_global("ACT", FORMER["ACT"]),
    ),
    "a partial call": (
        lambda y: PARTIAL(y),
        lambda: set_global("PARTIAL", functools.partial(torch.mul, other=7.0)),
        lambda: set_global("PARTIAL", FORMER["PARTIAL"]),
    ),
    "an enumeration": (
        lambda y: y * (2 if MODE is Mode.FAST else 5),
        lambda: set_global("MODE", Mode.SLOW),
        lambda: set_global("MODE", Mode.FAST),
    ),
    "in a set": (lambda y: y * (2 if 1 in CHOSEN else 5), lambda: CHOSEN.clear(), lambda: CHOSEN.add(1)),
    "in an array": (
        lambda y: y * float(ARRAY[0]),
        lambda: ARRAY.__setitem__(0, 5.0),
        lambda: ARRAY.__setitem__(0, 1.0),
    ),
    "of an object by a variable": (
        of_local,
        lambda: setattr(OBJECT, "scale", 9.0),
        lambda: setattr(OBJECT, "scale", 2.0),
    ),
    "of an object by an argument": (
        lambda y: of_argument(y, OBJECT),
        lambda: setattr(OBJECT, "scale", 9.0),
        lambda: setattr(OBJECT, "scale", 2.0),
    ),
    "of an object in a dictionary": (
        lambda y: y * OBJECTS["a"].scale,
        lambda: setattr(OBJECTS["a"], "scale", 9.0),
        lambda: setattr(OBJECTS["a"], "scale", 2.0),
    ),
    "in a slot": (
        lambda y: y * SLOTS.scale,
        lambda: setattr(SLOTS, "scale", 9.0),
        lambda: setattr(SLOTS, "scale", 2.0),
    ),
    "order": (lambda y: by_steps(y, STEPS), lambda: to_end(STEPS, "mul"), lambda: to_end(STEPS, "add")),
    "order of its own": (
        lambda y: by_steps(y, ORDERED),
        lambda: ORDERED.move_to_end("mul"),
        lambda: ORDERED.move_to_end("add"),
    ),
    "of the module's class by an object": (
        lambda y: y,
        lambda: setattr(Net.config, "scale", 4.0),
        lambda: setattr(Net.config, "scale", 2.0),
    ),
    "of the module's class": (lambda y: y, lambda: setattr(Net, "factor", 4.0), lambda: setattr(Net, "factor", 2.0)),
}  # fmt: skip


@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_is_changed_afterwards_counts(name: str, with_example: bool) -> None:
    read, change, back = CASES[name]
    model = (OfClass() if name.startswith("of the module's class") else Net(read)).eval()
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


@pytest.mark.parametrize(("read", "holder"), [(CASES["in a slot"][0], SLOTS), (of_local, OBJECT)])
def test_other_fields_do_not_count(read: Callable[[Any], Any], holder: Any) -> None:
    model = Net(read).eval()
    named = Named.of(model, Reached(model))
    assert named is not None and named.unchanged()
    holder.unread = object()
    assert named.unchanged()
    holder.scale = 3.0
    try:
        assert not named.unchanged()
    finally:
        holder.scale = 2.0
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
