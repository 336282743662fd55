"""Fewer threads beside other work: when they are tried, kept, and given up. Clock and switches are the test's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from fx_passes.region.region import ZenRegion
from zendnn_cffi.engine import contention
from zendnn_cffi.runtime import sharing
from zendnn_cffi.runtime.sharing import Sharing

MS = 1_000_000


class Machine:
    """A clock that programs advance, switches that other work causes, and how long calls take by threads."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.switches = 0.0
        self.switches_per_ms = 0.0
        self.ms = {2: 10.0, 1: 18.0}
        self.made: list[int] = []
        self.closed: list[int] = []
        self.possible = True
        self.elsewhere = 0

    def run(self, threads: int) -> None:
        assert torch.get_num_threads() == threads
        self.now_ns += round(self.ms[threads] * MS)
        self.switches += self.switches_per_ms * self.ms[threads]

    def is_busy(self) -> None:
        self.switches_per_ms, self.ms, self.elsewhere = 0.2, {2: 40.0, 1: 19.0}, 1

    def is_quiet(self) -> None:
        self.switches_per_ms, self.ms, self.elsewhere = 0.04, {2: 10.0, 1: 18.0}, 0


class Fake:
    """A program for so many threads."""

    def __init__(self, machine: Machine, threads: int) -> None:
        self.machine, self.threads = machine, threads

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.machine.run(self.threads)
        return [torch.tensor(self.threads)]

    def close(self) -> None:
        self.machine.closed.append(self.threads)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    found.is_quiet()

    def made(program: Any, threads: int, inputs: Sequence[torch.Tensor]) -> Fake | None:
        found.made.append(threads)
        return Fake(found, threads) if found.possible else None

    monkeypatch.setattr(sharing, "for_threads", made)
    monkeypatch.setattr(sharing, "involuntary_switches", lambda: int(found.switches))
    monkeypatch.setattr(sharing, "runnable_elsewhere", lambda: found.elsewhere)
    monkeypatch.setattr(sharing, "threads_left", lambda threads: threads - 1)
    monkeypatch.setattr(sharing.time, "perf_counter_ns", lambda: found.now_ns)
    monkeypatch.setattr(sharing.time, "monotonic", lambda: found.now_ns / 1e9)
    return found


def runner(machine: Machine) -> Sharing:
    assert torch.get_num_threads() == 2
    return Sharing(Fake(machine, 2), 2)  # type: ignore[arg-type]


def settled(machine: Machine) -> Sharing:
    """One that has computed for a second on the quiet machine."""
    shared = runner(machine)
    run(shared, machine, 1.0)
    return shared


def run(shared: Sharing, machine: Machine, seconds: float) -> list[int]:
    """Threads of each call for so long."""
    until, used = machine.now_ns + seconds * 1e9, []
    while machine.now_ns < until:
        used.append(int(shared([])[0]))
    return used


def test_a_quiet_machine_is_left_as_it_is(machine: Machine) -> None:
    assert set(run(runner(machine), machine, 60.0)) == {2} and not machine.made


def test_beside_other_work_fewer_threads_compute_until_it_is_quiet(machine: Machine) -> None:
    shared = settled(machine)
    machine.is_busy()
    used = run(shared, machine, 60.0)
    assert machine.made == [1]
    assert used.count(1) > 0.98 * len(used) and shared.threads_now == 1
    assert used[50:].count(2) >= 5  # all threads are tried again now and again, which takes little of the time
    assert 40.0 * used[50:].count(2) < 0.03 * 60e3
    machine.is_quiet()
    used = run(shared, machine, 4.0)
    assert set(used[-100:]) == {2} and shared.threads_now == 2
    machine.is_busy()
    assert run(shared, machine, 5.0)[-1] == 1 and machine.made == [1]  # it is still there


def test_a_slow_start_is_soon_over(machine: Machine) -> None:
    """Threads of another caller take the cores while a pool's thread starts; nobody else computes."""
    shared = runner(machine)
    machine.is_busy()
    machine.elsewhere = 0
    used = run(shared, machine, 0.15)
    machine.is_quiet()
    used += run(shared, machine, 10.0)
    assert machine.made == [1] and used[-1] == 2
    assert used.count(1) * machine.ms[1] < 500


def test_all_threads_return_where_nobody_tells_who_else_computes(machine: Machine) -> None:
    """A container that shows its host's numbers: somebody always computes."""
    shared = settled(machine)
    machine.is_busy()
    run(shared, machine, 20.0)
    machine.is_quiet()
    machine.elsewhere = 9
    assert set(run(shared, machine, 40.0)[-1000:]) == {2}


def test_fewer_threads_that_are_no_faster_are_given_up(machine: Machine) -> None:
    shared = settled(machine)
    machine.switches_per_ms, machine.ms = 0.2, {2: 20.0, 1: 19.0}
    used = run(shared, machine, 100.0)
    assert 1 in used and used.count(1) < 0.06 * len(used) and used[-1] == 2


def test_a_trial_ends_as_soon_as_it_has_lost(machine: Machine) -> None:
    shared = settled(machine)
    machine.switches_per_ms, machine.ms = 0.2, {2: 20.0, 1: 30.0}
    used = run(shared, machine, 1.0)
    assert 1 <= used.count(1) <= 3 and used[-1] == 2


def test_a_machine_that_became_slower_for_good_is_no_sign_for_ever(machine: Machine) -> None:
    """Another clock, another neighbour: switches without end, calls as long as they all are now."""
    shared = settled(machine)
    machine.switches_per_ms, machine.ms = 0.2, {2: 13.0, 1: 19.0}
    run(shared, machine, 10.0)
    assert set(run(shared, machine, 200.0)) == {2}


def test_slow_calls_alone_are_no_sign(machine: Machine) -> None:
    """Cold caches, a lower clock: nobody pushes threads off their cores."""
    shared = settled(machine)
    machine.ms = {2: 40.0, 1: 19.0}
    assert set(run(shared, machine, 20.0)) == {2}


def test_switches_alone_are_no_sign(machine: Machine) -> None:
    shared = settled(machine)
    machine.switches_per_ms = 0.3
    assert set(run(shared, machine, 20.0)) == {2}


def test_what_has_no_such_program_is_not_asked_again(machine: Machine) -> None:
    shared = settled(machine)
    machine.possible = False
    machine.is_busy()
    assert set(run(shared, machine, 30.0)) == {2} and machine.made == [1]


def test_a_failure_is_no_failure_of_the_call(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    shared = settled(machine)
    monkeypatch.setattr(sharing, "for_threads", fails)
    machine.is_busy()
    assert set(run(shared, machine, 10.0)) == {2}


def test_both_programs_are_closed(machine: Machine) -> None:
    shared = settled(machine)
    machine.is_busy()
    run(shared, machine, 5.0)
    shared.close()
    assert sorted(machine.closed) == [1, 2]


def test_other_work_is_counted_from_the_kernel(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "usable_cpus", lambda: 64)
    monkeypatch.setattr(contention, "runnable_elsewhere", lambda: 3)
    assert contention.threads_left(64) == 61 and contention.threads_left(16) == 15 and contention.threads_left(2) == 1
    monkeypatch.setattr(contention, "runnable_elsewhere", lambda: 500)
    assert contention.threads_left(64) == 1
    monkeypatch.undo()
    assert contention.runnable_elsewhere() >= 0 and contention.involuntary_switches() >= 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(32, 32, 3, padding=1) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_an_optimized_module_computes_the_same_bits_by_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way, on real programs: other work is made up, the trial decides for fewer threads."""
    torch.manual_seed(0)
    x = torch.randn(1, 32, 40, 40)
    model = Net().eval()
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        expected = fast(x).clone()
        (region,) = (m for m in fast.modules() if isinstance(m, ZenRegion))
        (found,) = region.lowered.values()
        assert found is not None and found.sharing is not None and found.sharing.threads == 2
        monkeypatch.setattr(sharing, "_TRIAL_NS", 0)
        monkeypatch.setattr(sharing, "SLOWER", 0.0)
        monkeypatch.setattr(sharing, "CLEARLY_FASTER", 1e9)
        monkeypatch.setattr(Sharing, "_is_worse_than", lambda *_: False)
        monkeypatch.setattr(sharing, "_SHARED_SECONDS", 1e9)
        counted = iter(range(0, 1 << 30, 1 << 10))
        monkeypatch.setattr(sharing, "involuntary_switches", lambda: next(counted))
        for _ in range(12):
            assert torch.equal(fast(x), expected)
        assert found.sharing.threads_now == 1 and found.sharing.state == "shared"
        assert "1 of 2 threads" in str(zendnn_cffi.explain(fast))
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


def test_one_thread_and_short_programs_are_not_watched() -> None:
    x = torch.randn(1, 32, 40, 40)
    fast = zendnn_cffi.optimize(Net().eval(), (x,), tune="off")
    small = zendnn_cffi.optimize(nn.Linear(4, 4).eval(), (torch.randn(2, 4),), tune="off")
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            fast(x)
    finally:
        torch.set_num_threads(2)
    with torch.no_grad():
        small(torch.randn(2, 4))
    for module in (fast, small):
        (region,) = (m for m in module.modules() if isinstance(m, ZenRegion))
        for lowered in region.lowered.values():
            assert lowered is None or lowered.sharing is None
