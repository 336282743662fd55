"""Threads of OpenMP that leave their core soon: when they are made to, for how long, and that they end."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from fx_passes.search.database import Database
from fx_passes.search.turn import Turn
from zendnn_cffi.engine import brief_waits as module
from zendnn_cffi.engine.brief_waits import BriefWaits, Crowding, Start, brief_waits, crowding

THREADS = 2


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two cores, another process on one of them, and a user who chose nothing."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(module, "usable_cpus", lambda: 2)
    monkeypatch.setattr(module, "runnable_elsewhere", lambda: 1)
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    brief_waits.stop()
    yield
    brief_waits.stop()
    torch.set_num_threads(before)


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def becomes(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def test_threads_are_made_once_and_end() -> None:
    torch.ones(1 << 20).add_(1)  # PyTorch's own threads are there
    waits, before = BriefWaits(), tasks()
    waits.keep(THREADS, 60.0)
    waits.keep(THREADS, 60.0)
    assert waits.are_on and becomes(lambda: tasks() == before + 2)
    assert torch.equal(torch.ones(1 << 20).add_(1), torch.full((1 << 20,), 2.0))
    waits.stop()
    assert not waits.are_on and becomes(lambda: tasks() == before)
    waits.stop()


def test_a_start_goes_on_where_no_thread_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has too many, or Python is ending."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with Start(THREADS):
            assert not brief_waits.are_on
    with Start(THREADS):
        assert brief_waits.are_on


def test_they_end_by_themselves_and_may_be_asked_for_again() -> None:
    waits, before = BriefWaits(), threading.active_count()
    for _ in range(3):
        waits.keep(THREADS, 0.0)
        assert becomes(lambda: not waits.are_on) and becomes(lambda: threading.active_count() == before)


def test_what_was_asked_last_counts() -> None:
    waits = BriefWaits()
    waits.keep(THREADS, 600.0)
    waits.keep(THREADS, 0.0)
    assert becomes(lambda: not waits.are_on)


def test_who_ends_them_waits_for_no_other_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start in another thread may ask anew while these end, and may wait for who ends them."""
    may_run, run = threading.Event(), BriefWaits._run

    def run_late(self: BriefWaits, *given: Any) -> None:
        may_run.wait(60)
        run(self, *given)

    monkeypatch.setattr(BriefWaits, "_run", run_late)
    waits = BriefWaits()
    waits.keep(THREADS, 600.0)
    ending = threading.Thread(target=waits.stop)
    ending.start()
    assert becomes(lambda: not waits.are_on)
    waits.keep(THREADS, 600.0)
    may_run.set()
    ending.join(30)
    assert not ending.is_alive() and waits.are_on
    waits.stop()
    assert not waits.are_on


@pytest.mark.parametrize(
    ("threads", "cores", "variable"),
    ((1, 2, ""), (2, 64, ""), (4, 1, ""), (2, 2, "OMP_WAIT_POLICY"), (2, 2, "GOMP_SPINCOUNT")),
)
def test_nothing_happens(threads: int, cores: int, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread waits for nobody, many cores are enough for all, and who chose has chosen."""
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: set(range(cores)))
    if variable:
        monkeypatch.setenv(variable, "1000")
    waits = BriefWaits()
    waits.keep(threads, 60.0)
    assert not waits.are_on


@pytest.mark.parametrize("elsewhere", (0, 1))
@pytest.mark.parametrize("waited_s", (0.0, 1e6))
def test_a_start_lingers_where_it_waited_for_cores(
    elsewhere: int, waited_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = iter((0, int(waited_s * 1e9)))
    monkeypatch.setattr(module, "runnable_elsewhere", lambda: elsewhere)
    monkeypatch.setattr(module, "thread_waited_ns", lambda: next(waited))
    monkeypatch.setattr(module, "LINGERING_SECONDS", 600.0)
    with Start(THREADS):
        assert brief_waits.are_on == bool(elsewhere)
    assert brief_waits.are_on == bool(elsewhere and waited_s)


def test_who_measures_ends_it() -> None:
    brief_waits.keep(THREADS, 600.0)
    with Turn(Database("a machine", None), 1, insists=True) as turn:
        assert turn.allows()
    assert not brief_waits.are_on


def test_a_first_call_is_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    fast, x = zendnn_cffi.optimize(model, tune="off"), torch.randn(1, 3, 9, 9)
    keep = brief_waits.keep
    monkeypatch.setattr(brief_waits, "keep", lambda *given: (keep(*given), seen.append(brief_waits.are_on)))
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        begun = len(seen)
        fast(x)
    assert begun >= 1 and all(seen) and len(seen) == begun


class Machine:
    """A clock, and for how long the thread that calls had a core and had none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.ran_ns = self.waited_ns = 0
        self.kept: list[float] = []
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "thread_ran_and_waited_ns", lambda: (self.ran_ns, self.waited_ns))
        monkeypatch.setattr(module, "brief_waits", self)
        self._until = 0.0

    def keep(self, threads: int, seconds: float) -> None:
        """In place of BriefWaits'."""
        assert threads == THREADS
        self.kept.append(seconds)
        self._until = self.now + seconds

    @property
    def are_on(self) -> bool:
        return self.now < self._until

    def stop(self) -> None:
        self._until = 0.0

    def calls(
        self, crowding: Crowding, seconds: float, share: float, threads: int = THREADS, step: float = 0.01
    ) -> None:
        """Calls one after the other for so long, whose thread has no core for that share of it."""
        until = self.now + seconds
        while self.now < until:
            self.now += step
            self.ran_ns += int((1 - share) * step * 1e9)
            self.waited_ns += int(share * step * 1e9)
            if self.now >= crowding.next_look:
                crowding.look(threads)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("step", (1e-3, 0.3))
def test_calls_that_wait_for_cores(step: float, clock: Machine) -> None:
    crowding = Crowding()
    clock.calls(crowding, 3.0, 0.0, step=step)
    assert clock.kept == []
    clock.calls(crowding, 1.4, 0.5, step=step)
    assert clock.kept == [module.LINGERING_SECONDS]


@pytest.mark.parametrize(("share", "threads"), ((0.1, THREADS), (0.5, 1)))
def test_calls_that_need_no_brief_waits(share: float, threads: int, clock: Machine) -> None:
    """Who waits a little, as beside a process that needs a core now and then; and one thread, which waits for none."""
    clock.calls(Crowding(), 10.0, share, threads)
    assert clock.kept == []


def test_now_and_then_is_no_reason(clock: Machine) -> None:
    crowding = Crowding()
    for _ in range(20):
        clock.calls(crowding, module.LOOK_SECONDS, 0.5)
        clock.calls(crowding, 2 * module.LOOK_SECONDS, 0.0)
    assert clock.kept == []


def test_they_last_longer_where_others_are_still_there(clock: Machine) -> None:
    crowding = Crowding()
    clock.calls(crowding, 30.0, 0.5)
    assert clock.kept[:4] == [1.5, 3.0, 6.0, 6.0]
    clock.calls(crowding, 30.0, 0.0)
    count = len(clock.kept)
    clock.calls(crowding, 1.0, 0.5)
    assert clock.kept[count:] == [1.5]


def test_who_ended_them_does_not_keep_them_from_coming_back(clock: Machine) -> None:
    """Measuring does, and a first call that found cores."""
    crowding = Crowding()
    clock.calls(crowding, 4.0, 0.5)
    count = len(clock.kept)
    clock.stop()
    clock.calls(crowding, 0.5, 0.5)
    assert len(clock.kept) == count + 1


def test_a_thread_with_the_number_of_one_that_ended(clock: Machine) -> None:
    crowding = Crowding()
    clock.ran_ns = 10**12
    clock.calls(crowding, 1.0, 0.0)
    clock.ran_ns = 0
    clock.calls(crowding, 0.5, 0.5)
    assert len(clock.kept) == 1


def test_a_little_time_tells_nothing(clock: Machine) -> None:
    """A server that computes for 2 ms a second: some seconds later it is known, whatever it waited in one call."""
    crowding = Crowding()
    crowding.look(THREADS)
    for call in range(100):
        clock.now += 1.0
        clock.waited_ns += 2_000_000
        if clock.now >= crowding.next_look:
            crowding.look(THREADS)
        assert bool(clock.kept) == (call >= 49)
        if clock.kept:
            break


def test_callers_in_turn_are_not_compared(clock: Machine) -> None:
    """What one thread waited is not another's."""
    crowding = Crowding()
    for _ in range(20):
        for call in (lambda: crowding.look(THREADS), lambda: in_a_thread(crowding)):
            clock.now += module.LOOK_SECONDS
            clock.waited_ns += 10**9
            call()
    assert clock.kept == []


def in_a_thread(crowding: Crowding) -> None:
    thread = threading.Thread(target=crowding.look, args=(THREADS,))
    thread.start()
    thread.join()


def test_each_call_of_a_program_may_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(crowding, "look", looks.append)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    fast, x = zendnn_cffi.optimize(model, tune="off"), torch.randn(1, 3, 9, 9)
    with torch.no_grad():
        fast(x)
        looks.clear()
        monkeypatch.setattr(crowding, "next_look", 0.0)
        fast(x)
        monkeypatch.setattr(crowding, "next_look", math.inf)
        fast(x)
    assert looks == [THREADS]


_TWO = """
import os, sys, torch, zendnn_cffi
from torch import nn
from zendnn_cffi.engine import brief_waits as module
torch.set_num_threads(2)
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()).eval()
fast, x = zendnn_cffi.optimize(model, tune="off"), torch.randn(2, 3, 16, 16)
with torch.inference_mode():
    expected = model(x)
    fast(x)
    print("ready", flush=True)
    sys.stdin.readline()
    module.brief_waits.stop()  # those of the first call
    found = 0
    while found < 2 or "wait" in sys.argv:
        torch.testing.assert_close(fast(x), expected)
        found += module.brief_waits.are_on
print(found)
"""


def test_a_process_beside_others_finds_out() -> None:
    """Three of two threads each on the same two cores."""
    values = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    others = [_process("wait", values) for _ in range(2)]
    one = _process("", values)
    try:
        for process in (*others, one):
            assert process.stdout.readline() == "ready\n"
        for process in (*others, one):
            process.stdin.write("\n")
            process.stdin.flush()
        assert int(one.communicate(timeout=120)[0]) == 2
        assert all(process.poll() is None for process in others)
    finally:
        for process in (*others, one):
            process.kill()
            process.communicate()


def _process(argument: str, values: dict[str, str]) -> Any:
    return subprocess.Popen(
        [sys.executable, "-c", _TWO, argument], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=values
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_has_none_and_computes() -> None:
    brief_waits.keep(THREADS, 600.0)
    child = os.fork()
    if child == 0:
        is_right = not brief_waits.are_on and bool((torch.ones(1 << 16).add_(1) == 2).all())
        brief_waits.keep(1, 1.0)
        brief_waits.stop()
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0 and brief_waits.are_on
