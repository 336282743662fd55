"""Plain attributes that are set after optimize(): calls are as in eager PyTorch, and unread ones cost nothing."""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.trace.attributes import Attributes, names_read
from zendnn_cffi.api.replace_forward import replace_forward


class Settings:
    """Answers for names that it has not."""

    def __init__(self) -> None:
        self.held = 2.0

    def __getattr__(self, name: str) -> Any:
        if name == "shift":
            return self.held
        raise AttributeError(name)


@dataclasses.dataclass(slots=True)
class Slots:
    gain: float = 1.5
    unread: int = 0


class Block(nn.Module):
    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.is_bent, self._power = nn.Linear(6, 6), 1.5, True, 2
        self.named, self.listed, self.nested = {"a": 1.5}, [1.5], ({"b": [1.5]},)
        self.options = types.SimpleNamespace(inner=types.SimpleNamespace(gain=1.5))
        self.settings, self.chosen, self.row = Settings(), {1.5}, numpy.array([1.5, 2.5])
        self.slots, self.steps = Slots(), {"mul": 1.5, "add": 1.0}
        self.ordered = collections.OrderedDict(self.steps)
        self.unread = 0

    @property
    def power(self) -> int:
        return self._power

    def bend(self, y: Tensor) -> Tensor:
        return F.leaky_relu(y, 0.3) if self.is_bent else y

    def forward(self, x: Tensor) -> Tensor:
        y = self.bend(self.linear(x)) * self.scale * self.factor + self.settings.shift
        y = y * sum(self.chosen) + float(self.row[0]) * self.slots.gain
        for name, value in (*self.steps.items(), *self.ordered.items()):
            y = y * value if name == "mul" else y + value
        return y**self.power * self.named["a"] * self.listed[0] * self.nested[0]["b"][0] * self.options.inner.gain


class Other(Block):
    def bend(self, y: Tensor) -> Tensor:
        return -y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.block, self.slope = nn.Conv2d(3, 6, 3), Block(), nn.LeakyReLU(0.1)
        self.norm, self.head, self.dim = nn.LayerNorm(6), nn.Sequential(nn.Linear(6, 4), nn.ELU()), (2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.slope(self.conv(x)).mean(self.dim)
        result: Tensor = self.head(self.norm(self.block(y)))
        return result


Change = Callable[[Any], object]
CHANGES: dict[str, Change] = {
    "a number": lambda m: setattr(m.block, "scale", 7.0),
    "a flag": lambda m: setattr(m.block, "is_bent", False),
    "behind a property": lambda m: setattr(m.block, "_power", 3),
    "what the class has": lambda m: setattr(m.block, "factor", 5.0),
    "in a dictionary": lambda m: m.block.named.update(a=5.0),
    "in a list": lambda m: m.block.listed.__setitem__(0, 5.0),
    "deep in containers": lambda m: m.block.nested[0]["b"].__setitem__(0, 5.0),
    "in a set": lambda m: m.block.chosen.add(4.0),
    "in an array": lambda m: m.block.row.__setitem__(0, 5.0),
    "another class": lambda m: setattr(m.block, "__class__", Other),
    "of an object": lambda m: setattr(m.block.options.inner, "gain", 5.0),
    "in a slot": lambda m: setattr(m.block.slots, "gain", 5.0),
    "order": lambda m: m.block.steps.__setitem__("mul", m.block.steps.pop("mul")),
    "order of its own": lambda m: m.block.ordered.move_to_end("mul"),
    "another object": lambda m: setattr(m.block.options, "inner", types.SimpleNamespace(gain=5.0)),
    "of an object that answers for others": lambda m: setattr(m.block.settings, "held", 5.0),
    "of the outermost module": lambda m: setattr(m, "dim", (3, 2)),
    "stride": lambda m: setattr(m.conv, "stride", (2, 2)),
    "padding": lambda m: setattr(m.conv, "padding", (1, 1)),
    "slope": lambda m: setattr(m.slope, "negative_slope", 0.9),
    "eps": lambda m: setattr(m.norm, "eps", 0.9),
    "alpha": lambda m: setattr(m.head[1], "alpha", 3.0),
}  # fmt: skip
X = torch.randn(16, 3, 7, 7, generator=torch.Generator().manual_seed(0))


def check(fast: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))


@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_set_counts(name: str, with_example: bool) -> None:
    model = Net().eval()
    fast: Any = zendnn_cffi.optimize(model, (X,) if with_example else None, tune="off")
    before = copy.deepcopy(model)
    check(fast, model)
    assert list(fast.regions())
    CHANGES[name](fast)
    CHANGES[name](model)
    for _ in range(3):
        check(fast, model)
    assert fast._watch.unchanged(fast), "a graph is there again"
    assert list(fast.regions())
    assert name == "of the outermost module" or not torch.equal(before(X), model(X))


def test_what_is_set_in_a_model_that_something_else_holds() -> None:
    model = Net().eval()
    expected = copy.deepcopy(model)
    replaced = replace_forward(model, tune="off")
    check(model, expected)
    for change in CHANGES.values():
        change(model)
        change(expected)
        for _ in range(3):
            check(model, expected)
    assert replaced.modules
    replaced.undo()


def test_what_no_forward_reads_makes_nothing_anew() -> None:
    model = Net().eval()
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    block = fast.block
    check(fast, model)
    watch, graph = fast._watch, fast.graph
    for number in range(3):
        block.unread = number
        block.slots.unread = number
        fast.stage = f"step {number}"
        check(fast, model)
    assert fast._watch is watch and fast.graph is graph


def test_equal_values_count_for_nothing() -> None:
    model = Net().eval()
    attributes = Attributes(model.modules())
    model.conv.stride = tuple(map(int, "11"))  # another object
    model.block.scale = float("1.5")
    assert attributes.unchanged() and attributes.looks_unchanged()
    model.block.listed[0] = 2.5
    assert not attributes.unchanged() and not attributes.looks_unchanged()
    model.block.listed[0] = 1.5
    assert attributes.unchanged()


def test_equal_lists_are_followed_from_then_on() -> None:
    model = Net().eval()
    attributes, before = Attributes(model.modules()), model.block.listed
    for _ in range(3):
        model.block.listed = [*model.block.listed]
        assert attributes.unchanged() and attributes.looks_unchanged()
    before[0] = 2.5  # which nobody reads any longer
    assert attributes.unchanged() and attributes.looks_unchanged()
    assert sum(name == "listed" for _, name, _ in attributes._lists) == 1
    model.block.listed[0] = 2.5
    assert not attributes.unchanged() and not attributes.looks_unchanged()
    model.block.listed[0] = 1.5
    assert attributes.unchanged()
    model.block.listed = [1.5, 1.5]
    assert not attributes.unchanged()
    model.block.listed = (1.5,)
    assert not attributes.unchanged()


def test_a_list_that_is_read_elsewhere_is_followed_there_too() -> None:
    model = Net().eval()
    shared = model.block.nested[0]["b"] = model.block.listed
    attributes = Attributes(model.modules())
    model.block.listed = [*shared]
    assert attributes.unchanged()
    shared[0] = 2.5
    assert not attributes.unchanged() and not attributes.looks_unchanged()


def test_names_that_code_reaches() -> None:
    found = names_read([Net, Block])
    assert found is not None
    assert {"scale", "is_bent", "_power", "power", "factor", "gain", "dim"} <= found
    assert "unread" not in found


class Asking(Block):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = getattr(self, "".join(("lin", "ear")))(x)
        return result


def test_code_that_may_read_any_name() -> None:
    assert names_read([Asking]) is None
