"""Objects of the user's own that hold values: what is in them, and tensors there that are written to later."""

from __future__ import annotations

import argparse
import copy
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.trace.skeleton import tensors_in
from fx_passes.trace.theirs import fields_of, is_theirs


class Box:
    """Refers to itself, and holds what cannot be copied."""

    def __init__(self) -> None:
        self.scale, self.inner = torch.full((3,), 2.0), types.SimpleNamespace(shift=[torch.full((3,), 3.0)])
        self.itself, self.lock = self, threading.Lock()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.box = nn.Linear(3, 3), Box()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) * self.box.scale + self.box.inner.shift[0] * 2
        return result


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (types.SimpleNamespace(a=1), {"a"}),
        (argparse.Namespace(b=2), {"b"}),
        (Box(), {"scale", "inner", "itself", "lock"}),
        (nn.Linear(1, 1), set()),
        (torch.ones(1), set()),
        (threading.Thread(), set()),
        (Box, set()),
        (torch, set()),
        (3, set()),
    ],
)
def test_fields(value: Any, names: set[str]) -> None:
    assert fields_of(value).keys() == names


def test_whose_a_module_is() -> None:
    assert is_theirs("transformers.models") and is_theirs("__main__")
    assert not any(map(is_theirs, ("torch.nn", "numpy", "zendnn_cffi.api", "fx_passes", "threading")))


def test_tensors_in_objects_are_found_once() -> None:
    box = Box()
    assert {id(each) for each in tensors_in([box, {"a": box}])} == {id(box.scale), id(box.inner.shift[0])}


def write(model: Any) -> None:
    model.box.scale.mul_(2)
    model.box.inner.shift[0].mul_(3)


def replace(model: Any) -> None:
    model.box.scale = torch.full((3,), 5.0)
    model.box.inner.shift[0] = torch.full((3,), 7.0)


@pytest.mark.parametrize("change", [write, replace])
@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize("written", ["result", "original"])
def test_tensors_in_objects_may_change(change: Callable[[Any], None], with_example: bool, written: str) -> None:
    model, x = Net().eval(), torch.randn(2, 3)
    del model.box.lock
    fast: Any = zendnn_cffi.optimize(model, (x,) if with_example else None, tune="off")
    expected = copy.deepcopy(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), expected(x))
        assert fast.regions()
        if change is replace and written == "original":
            return  # the result has attributes of its own
        change(fast if written == "result" else model)
        change(expected)
        for _ in range(3):
            torch.testing.assert_close(fast(x), expected(x))
    assert fast.regions()


def test_what_cannot_be_copied_is_shared() -> None:
    model, x = Net().eval(), torch.randn(2, 3)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(zendnn_cffi.optimize(model, tune="off")(x), expected)
        torch.testing.assert_close(zendnn_cffi.optimize(model, (x,), tune="off")(x), expected)
