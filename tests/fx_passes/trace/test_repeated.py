"""Forwards that give something else each time, by what lies where nobody looks."""

from __future__ import annotations

import collections
import contextvars
import functools
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.trace.repeated import changes_when_called, first_difference
from fx_passes.trace.state import is_near
from tests.support.exported import needs_export
from tests.support.lowering import noise
from tests.tolerance import assert_close

X = [noise(3, 8, seed=seed) for seed in range(3)]
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=0)
LOCAL = threading.local()
DRAWN, DRAWN_BY_NUMPY = random.Random(3), numpy.random.default_rng(3)
BYTES = bytearray(1)
DEEP: Any = [[[[[[[[0]]]]]]]]
LARGE = [0] * 10_000
CALLS = 0


@functools.cache
def cached() -> int:
    return 0


def count() -> float:
    global CALLS
    CALLS += 1
    return float(CALLS)


def calls_count() -> float:
    return count()


def calls_what_calls_count() -> float:
    return calls_count()


def calls_what_calls_what_calls_count() -> float:
    return calls_what_calls_count()


def variable() -> float:
    VARIABLE.set(VARIABLE.get() + 1)
    return VARIABLE.get()


def of_the_thread() -> float:
    LOCAL.n += 1
    return float(LOCAL.n)


def environment() -> float:
    os.environ["ZENDNN_CFFI_TEST"] = str(int(os.environ["ZENDNN_CFFI_TEST"]) + 1)
    return float(os.environ["ZENDNN_CFFI_TEST"])


def count_in_bytes() -> float:
    BYTES[0] += 1
    return float(BYTES[0])


def count_deep_inside() -> float:
    innermost = DEEP[0][0][0][0][0][0][0]
    innermost[0] += 1
    return float(innermost[0])


def count_in_a_large_list() -> float:
    LARGE[17] += 1
    return float(LARGE[17])


def hits() -> float:
    cached()
    return float(cached.cache_info().hits)


# what is read, and what lets it begin again
READ: dict[str, tuple[Callable[[], float], Callable[[], Any]]] = {
    "a context variable": (variable, lambda: VARIABLE.set(0)),
    "a thread's own": (of_the_thread, lambda: setattr(LOCAL, "n", 0)),
    "the environment": (environment, lambda: os.environ.update(ZENDNN_CFFI_TEST="0")),
    "Python's random numbers": (random.random, lambda: random.seed(1)),
    "numpy's random numbers": (lambda: float(numpy.random.rand()), lambda: numpy.random.seed(1)),
    "bytes": (count_in_bytes, lambda: BYTES.__setitem__(0, 0)),
    "deep inside": (count_deep_inside, lambda: DEEP[0][0][0][0][0][0][0].__setitem__(0, 0)),
    "a large list": (count_in_a_large_list, lambda: LARGE.__setitem__(17, 0)),
    "a cache's statistics": (hits, cached.cache_clear),
    "functions of functions": (calls_what_calls_what_calls_count, lambda: globals().update(CALLS=0)),
}


class Reading(nn.Module):
    def __init__(self, read: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(8, 8), read

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * self.read()
        return y


class Branching(Reading):
    """Which torch.fx cannot trace, and torch.export can."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1 if needs_export(x) and x.shape[0] > 100 else x)


HIDDEN = ("deep inside", "a large list", "a cache's statistics", "functions of functions")
EXPORTED = ("a context variable", "Python's random numbers", "deep inside")


@pytest.mark.parametrize(
    ("name", "cls"), [*((name, Reading) for name in READ), *((name, Branching) for name in EXPORTED)]
)
def test_a_forward_that_changes_by_itself_stays_plain(name: str, cls: type[Reading]) -> None:
    read, begin = READ[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), cls(read)).eval()
    begin()
    with torch.no_grad():
        expected = [model(x) for x in X]
    begin()
    fast: Any = zendnn_cffi.optimize(model, X[0], tune="off")
    told = "something else each time" if name in HIDDEN else "changes"
    assert all(told in reason for reason in fast.leaves.values()) and fast.leaves
    assert all(reason in str(zendnn_cffi.explain(fast)) for reason in fast.leaves.values())
    if name in HIDDEN:
        begin()  # what is found is put back
    with torch.no_grad():
        for x, result in zip(X, expected, strict=True):
            assert_close(fast(x), result, k=64)


def test_a_clock() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Reading(lambda: float(time.perf_counter_ns()))).eval()
    assert "something else each time" in str(zendnn_cffi.optimize(model, tune="off").leaves)


@pytest.mark.parametrize("cls", (Reading, Branching))
def test_what_stays_the_same_is_in_the_graph(cls: type[Reading]) -> None:
    """A clock that is read, but not used, a cache, an environment variable that nobody writes, NaN."""

    def read() -> float:
        time.perf_counter()
        return cached() + len(os.environ["PATH"]) + 0 * float("nan")

    fast: Any = zendnn_cffi.optimize(nn.Sequential(nn.Linear(8, 8), cls(read)).eval(), X[0], tune="off")
    assert not fast.leaves


def graph_of(forward: Callable[[Any, Any], Any]) -> tuple[torch.fx.Graph, nn.Module]:
    module = nn.Module()
    tracer = torch.fx.Tracer()
    type(module).forward = nn.Module.forward
    module.__class__ = type("Traced", (nn.Module,), {"forward": forward})
    return tracer.trace(module), module


@pytest.mark.parametrize(
    ("one", "other", "differs"),
    (
        (lambda m, x: x + 1, lambda m, x: x + 1, False),
        (lambda m, x: x + 1, lambda m, x: x + 2, True),
        (lambda m, x: x + 1, lambda m, x: x + 1.0, True),
        (lambda m, x: x + 1, lambda m, x: x - 1, True),
        (lambda m, x: x + 1, lambda m, x: (x + 1) * 1, True),
        (lambda m, x: (x + 1, x), lambda m, x: (x + 1, x + 1), True),
        (lambda m, x: x.reshape((2, 3)), lambda m, x: x.reshape((3, 2)), True),
        (lambda m, x: x + float("nan"), lambda m, x: x + float("nan"), False),
    ),
)
def test_graphs_that_differ(one: Any, other: Any, differs: bool) -> None:
    (graph, root), (again, _) = graph_of(one), graph_of(other)
    assert (first_difference(graph, again, root) is not None) == differs


def test_called_on_the_example() -> None:
    read, begin = READ["bytes"]
    begin()
    assert changes_when_called(Reading(read).eval(), ((X[0],), {}), writes=False)
    assert not changes_when_called(Reading(lambda: 1.0).eval(), ((X[0],), {}), writes=False)
    assert not changes_when_called(Reading(lambda: 1.0).eval(), ((), {}), writes=False), "an example it does not take"


def test_functions_that_namedtuple_makes_are_no_code_of_the_users() -> None:
    made = collections.namedtuple("Made", "value").__new__  # type: ignore[misc]
    assert not is_near(made.__module__) and is_near(__name__) and not is_near(torch.nn.__name__)
