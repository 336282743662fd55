"""Augmented assignments write where eager's do: to a value of any name, to inputs, to buffers by `self.n += 1`.

Buffers that another tensor replaces are not written, and numbers keep their value under other names.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.graph.graph import AUGMENTED
from fx_passes.pipeline import compile_graph
from tests.support.lowering import noise


class Counts(nn.Module):
    """A layer beside buffers; `step` is what a forward does with them."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4)
        self.inner = nn.Module()
        self.inner.register_buffer("n", torch.ones(()))
        self.register_buffer("n", torch.ones(()))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("ring", torch.zeros(3, 4))
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, torch.relu(self.layer(x)))


def adds(m: Any, y: Tensor) -> Tensor:
    m.n += 1
    return y * m.n


def every_operator(m: Any, y: Tensor) -> Tensor:
    m.n += y.mean()
    m.n -= 0.25
    m.n *= 0.5
    m.n /= 0.75
    return y + m.n


def is_read_before_and_after(m: Any, y: Tensor) -> Tensor:
    before, product = m.n, m.n * y
    m.n += 1
    return product + before * 10 + m.n * 100  # before is the buffer, too


def keeps_a_ring(m: Any, y: Tensor) -> Tensor:
    m.ring[m.place % 3] = y.mean(0)
    m.place += 1
    return y - m.ring.mean(0)


def of_a_module_inside(m: Any, y: Tensor) -> Tensor:
    m.inner.n *= 2
    return y * m.inner.n


WRITES = {f.__name__: f for f in (adds, every_operator, is_read_before_and_after, keeps_a_ring, of_a_module_inside)}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("has_example", [True, False])
def test_the_graph_writes(name: str, has_example: bool, tmp_path: Path) -> None:
    x = noise(5, 6)
    model = Counts(WRITES[name]).eval()
    fast: Any = zendnn_cffi.optimize(copy.deepcopy(model), (x,) if has_example else None, tune="off")
    assert not fast.leaves and len(fast.regions()) >= 1

    def compare(module: Any, calls: int) -> None:
        for seed in range(calls):
            torch.testing.assert_close(module(noise(5, 6, seed=seed)), model(noise(5, 6, seed=seed)))
            torch.testing.assert_close(dict(module.named_buffers()), dict(model.named_buffers()))

    with torch.no_grad():
        compare(fast, 3)
        zendnn_cffi.save(fast, tmp_path / "m")
        compare(zendnn_cffi.load(tmp_path / "m"), 3)


def replaces(m: Any, y: Tensor) -> Tensor:
    m.n = m.n + 1
    return y * m.n


def adds_and_replaces(m: Any, y: Tensor) -> Tensor:
    m.n += 1
    m.n = m.n * 2
    return y * m.n


def exchanges(m: Any, y: Tensor) -> Tensor:
    n = m.inner.n
    n += 1
    m.n = n  # another buffer
    return y * m.n


@pytest.mark.parametrize("step", [replaces, adds_and_replaces, exchanges])
def test_what_replaces_a_buffer_is_no_graph(step: Callable[[Any, Tensor], Tensor]) -> None:
    model, x = Counts(step).eval(), noise(5, 6)
    gm: Any = compile_graph(copy.deepcopy(model))
    assert "its forward changes self.n" in gm.leaves[""]
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(gm(x), model(x))
            torch.testing.assert_close(dict(gm.named_buffers()), dict(model.named_buffers()))


INTEGERS = (operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift)


class Assigns(nn.Module):
    """`operation` on a buffer, on an input and on a value, each of which has another name, or a view."""

    def __init__(self, operation: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.operation = nn.Linear(6, 6), operation
        self.dtype = torch.int64 if operation in INTEGERS else torch.float32
        self.register_buffer("n", torch.full((3,), 7).to(self.dtype))

    def forward(self, x: Tensor, given: Tensor) -> Any:
        y = (self.layer(x) * 8).abs() + 1
        value = y.to(self.dtype)
        first, same = value[:1], value
        value = self.operation(value, 2)
        input, self_n = given, self.n
        given = self.operation(given, 2)
        self_n = self.operation(self_n, 3)
        return self.layer(first.float()), same, self.layer(value.float()), input, given, self.n * 1


@pytest.mark.parametrize("operation", AUGMENTED, ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("way", ["first call", "example", "compile"])
def test_augmented_assignments_are_in_place(operation: Callable[[Any, Any], Any], way: str) -> None:
    model, x = Assigns(operation).eval(), noise(5, 6)
    given = torch.full((4,), 9).to(model.dtype)
    copied, ours = copy.deepcopy(model), given.clone()
    fast: Any
    if way == "compile":
        torch._dynamo.reset()
        fast = torch.compile(copied, backend="zendnn", options={"tune": "off"})
    else:
        fast = zendnn_cffi.optimize(copied, (x, given.clone()) if way == "example" else None, tune="off")
        assert not fast.leaves and fast.regions()
    with torch.no_grad():
        for _ in range(2):
            expected, got = model(x, given), fast(x, ours)
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(ours, given)
            torch.testing.assert_close(fast.state_dict()["n"] if way != "compile" else copied.n, model.n)
            assert got[3] is ours and got[4] is ours


@pytest.mark.parametrize("operation", AUGMENTED, ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("of", ["size", "shape", "number"])
@pytest.mark.parametrize("has_example", [True, False])
def test_numbers_keep_their_value_under_another_name(
    operation: Callable[[Any, Any], Any], of: str, has_example: bool
) -> None:
    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor, count: int) -> Any:
            n = {"size": x.size(0), "shape": x.shape[0], "number": count}[of]
            before = n
            n = operation(n, 2)
            y = self.layer(x)
            return self.layer(y.reshape(x.size(0), -1)), y.new_ones(before), before, n

    model, x = Sizes().eval(), noise(5, 6)
    fast: Any = zendnn_cffi.optimize(model, (x, 5) if has_example else None, tune="off")
    assert not fast.leaves and len(fast.regions()) == 1
    with torch.no_grad():
        torch.testing.assert_close(fast(x, 5), model(x, 5))
        torch.testing.assert_close(fast(x, 9), model(x, 9))
        if of != "number":
            torch.testing.assert_close(fast(noise(4, 6), 5), model(noise(4, 6), 5))


def test_sizes_that_augmented_assignments_compute_cut_no_region() -> None:
    class Reshapes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[1]
            n **= 2
            n //= 6
            return torch.relu(self.layer(self.layer(x).reshape(-1, n)))

    model, x = Reshapes().eval(), noise(5, 6)
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert len(fast.regions()) == 1
