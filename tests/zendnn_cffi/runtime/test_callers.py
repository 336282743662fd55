"""Who calls from several threads leaves no OpenMP threads behind."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from zendnn_cffi.runtime import callers as module
from zendnn_cffi.runtime.callers import Callers

MAIN, ONE, OTHER = threading.main_thread().ident or 0, 1, 2


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(module, "release_team", lambda: found.append("own"))
    monkeypatch.setattr(module, "release_main_team", lambda: found.append("main's"))
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: range(3))
    return found


def program(calls: int = 20, running: bool = False) -> Any:
    return SimpleNamespace(calls=[None] * calls, is_running=running)


def test_the_main_thread_is_alone_at_first(released: list[str]) -> None:
    assert Callers().alone == MAIN and not released


def test_a_worker_asks_the_main_thread_and_ends_its_own_until_it_is_alone(released: list[str]) -> None:
    callers = Callers()
    for _ in range(module._IN_A_ROW):
        assert callers.alone != ONE
        callers.called(ONE, program(), 2)
    assert callers.alone == ONE
    assert released == ["main's"] + ["own"] * (module._IN_A_ROW - 1)


def test_callers_in_turns_are_never_alone(released: list[str]) -> None:
    callers = Callers()
    for _ in range(2 * module._IN_A_ROW):
        for caller in (ONE, OTHER, MAIN):
            callers.called(caller, program(), 2)
            assert callers.alone == 0
    assert released.count("own") == 6 * module._IN_A_ROW


@pytest.mark.parametrize(
    ("kind", "found"), [("one thread", []), ("few loops", ["main's"]), ("beside another call", ["main's"])]
)
def test_threads_stay_where_ending_them_saves_nothing(released: list[str], kind: str, found: list[str]) -> None:
    few = 2 * module._CALLS_PER_THREAD - 1 if kind == "few loops" else 20
    Callers().called(ONE, program(few, kind == "beside another call"), 1 if kind == "one thread" else 2)
    assert released == found


def test_threads_stay_while_there_are_cores_for_all(released: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: range(6))
    callers = Callers()
    for caller in (ONE, OTHER, ONE):
        callers.called(caller, program(), 2)
    assert not released, "three callers of two threads"
    callers.called(3, program(), 2)
    callers.called(ONE, program(), 2)
    assert released == ["main's", "own", "main's", "own"]


SERVER = """
import os, time
from concurrent.futures import ThreadPoolExecutor
import torch
from torch import nn
import zendnn_cffi
from zendnn_cffi.engine.openmp import release_team

torch.set_num_threads(2)
model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()))).eval()
fast = zendnn_cffi.optimize(model, tune="off")
x = torch.randn(1, 16, 64, 64)

def threads():
    return len(os.listdir("/proc/self/task"))

def comes_to(count):
    return any(threads() == count or time.sleep(0.01) for _ in range(500))

with torch.no_grad():
    release_team()
    time.sleep(0.5)  # what ended may be listed for a moment
    alone = threads()
    expected = fast(x)
    assert torch.allclose(expected, model(x), atol=1e-5)
    assert threads() == alone + 1, "the main thread's stay"
    def one():
        with torch.no_grad():
            return fast(x)
    pools = [ThreadPoolExecutor(1) for _ in range(3)]
    results = [pool.submit(one).result() for _ in range(3) for pool in pools]
    assert comes_to(alone + len(pools)), (threads(), alone)
    assert all(torch.allclose(result, expected, atol=1e-5) for result in results)
print("done")
"""


def test_a_pool_of_threads_leaves_none_behind(run_python: Any) -> None:
    settings = {"GOMP_SPINCOUNT": "300000"}  # the default; so that nothing else makes threads beside other work
    assert run_python(SERVER, env=settings).stdout.split()[-1] == "done"
