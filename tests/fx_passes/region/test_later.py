"""What a first call left out is measured when no calls come, and the program is replaced."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from fx_passes.region import later as module
from fx_passes.region.later import Later, later
from fx_passes.region.region import ZenRegion
from fx_passes.search.database import Database
from fx_passes.search.noise import made_up
from fx_passes.search.tuner import database_for
from tests.support.lowering import net, noise
from zendnn_cffi.locks import _making, making


def hurried(**options: Any) -> tuple[nn.Module, Any, ZenRegion, torch.Tensor]:
    """A model, optimized without time to measure, its region, and what it was called with."""
    model = net(lambda m, x: m[1](F.relu(m[0](x))), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1))
    x = noise(2, 16, 8, 8)
    fast: Any = zendnn_cffi.optimize(model, tune_seconds=0, **options)
    fast(x)
    (region,) = fast.regions().values()
    return model, fast, region, x


def program(region: ZenRegion) -> Any:
    (lowered,) = region.lowered.values()
    return lowered


def test_it_measures_and_replaces_the_program(fresh: Path) -> None:
    model, fast, region, x = hurried()
    first = program(region)
    assert not first.is_measured or region.programs.provisional
    assert region.improve(lambda: False)
    second = program(region)
    assert second is not first and not region.programs.provisional
    database = database_for(torch.get_num_threads())
    assert any(not key.startswith("checked ") for key in database._results)
    torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)
    assert len(Database(database._machine, fresh)) == len(database), "and all of it is kept"


def test_calls_are_answered_where_no_thread_begins(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has too many, or Python is ending: functions of atexit call models, too."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    again = Later()
    monkeypatch.setattr("fx_passes.region.region.later", again)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        model, fast, region, x = hurried()
        torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)
        assert region.programs.provisional
    assert again._thread is None
    again.add(region)
    assert again._thread is not None, "it is tried again"
    again.stop()


def test_an_interruption_leaves_it_for_later(fresh: Path) -> None:
    _, _, region, _ = hurried()
    first = program(region)
    assert not region.improve(lambda: True)
    assert program(region) is first and region.programs.provisional
    looks = iter((False, False, True))
    assert not region.improve(lambda: next(looks, True))
    assert program(region) is first and region.programs.provisional


def test_what_another_process_measured_is_taken_over_without_measuring(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, region, _ = hurried()
    mine = database_for(torch.get_num_threads())
    database_for.cache_clear()
    _, _, elsewhere, _ = hurried()
    assert elsewhere.improve(lambda: False), "as another process would"
    monkeypatch.setattr("fx_passes.search.tuner.database_for", lambda threads, **_: mine)
    first = program(region)
    assert region.improve(lambda: True)
    assert program(region) is not first


def test_changed_weights_forget_what_waits(fresh: Path) -> None:
    model, fast, region, x = hurried()
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    fast.invalidate()
    assert not region.programs.provisional
    assert region.improve(lambda: False) and not region.lowered
    torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)


def test_released_weights_stay_as_they_are(fresh: Path) -> None:
    model, fast, region, x = hurried(release_weights=True)
    first = program(region)
    assert region.improve(lambda: False)
    assert program(region) is first
    torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)


class Fake:
    """A region as the thread sees it."""

    def __init__(self, improve: Callable[[Callable[[], bool]], bool]) -> None:
        self.count, self._improve = 0, improve
        self.done = threading.Event()

    def calls(self) -> int:
        return self.count

    def improve(self, interrupted: Callable[[], bool]) -> bool:
        try:
            return self._improve(interrupted)
        finally:
            self.done.set()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Later:
    for name in ("FIRST_SECONDS", "QUIET_SECONDS", "_POLL_SECONDS"):
        monkeypatch.setattr(module, name, 0.02)
    return Later()


def test_the_thread_ends_when_nothing_waits(quick: Later) -> None:
    fake = Fake(lambda interrupted: not interrupted())
    quick.add(fake)
    thread = quick._thread
    assert thread is not None and fake.done.wait(10)
    thread.join(10)
    assert not thread.is_alive()
    again = Fake(lambda interrupted: True)
    quick.add(again)
    assert again.done.wait(10)
    quick.stop()


def test_all_of_it_may_be_measured_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is compared with others, say: and not beside the thread that does so when no calls come."""
    again, held = Later(), list[bool]()
    monkeypatch.setattr(module, "begun", lambda *_: None)

    def improve(interrupted: Callable[[], bool]) -> bool:
        held.append(not interrupted())
        other = threading.Thread(target=lambda: held.append(_making.acquire(blocking=False)))
        other.start()
        other.join(10)
        return len(held) == 2  # the second one stays

    fakes = [Fake(improve), Fake(improve)]
    for fake in fakes:
        again.add(fake)
    again.measure_now()
    assert held == [True, False, True, False] and len(again._waiting) == 1


def test_calls_and_other_makers_interrupt(quick: Later) -> None:
    seen: list[bool] = []

    def improve(interrupted: Callable[[], bool]) -> bool:
        seen.append(interrupted())
        fake.count += 1
        seen.append(interrupted())
        fake.count -= 1
        with making():
            waiting = threading.Thread(target=wait_for_making)
            waiting.start()
            until = time.monotonic() + 10
            while not interrupted() and time.monotonic() < until:
                time.sleep(0.01)
            seen.append(interrupted())
        return True

    def wait_for_making() -> None:
        with making():
            pass

    fake = Fake(improve)
    quick.add(fake)
    assert fake.done.wait(30)
    quick.stop()
    assert seen == [False, True, True]


def test_it_does_not_measure_beside_the_threads_of_calls(quick: Later, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would make its own sleep. It says so; calls end theirs then, but not each call of many."""
    sleeps, released = [True], list[int]()
    monkeypatch.setattr(module, "team_sleeps", lambda threads: sleeps[0])
    monkeypatch.setattr(module, "release_team", lambda: released.append(threading.get_ident()))
    seen: list[bool] = []

    def improve(interrupted: Callable[[], bool]) -> bool:
        seen.append(interrupted())
        return not seen[-1]

    fake = Fake(improve)
    quick.add(fake)
    assert fake.done.wait(10)
    until = time.monotonic() + 10
    while not quick.waits_for_threads and time.monotonic() < until:
        time.sleep(0.01)
    assert quick.waits_for_threads
    monkeypatch.setattr(module, "RELEASE_SECONDS", 60.0)
    for _ in range(3):
        quick.let_have_threads()
    assert released.count(threading.get_ident()) == 1
    sleeps[0] = False
    assert quick._thread is not None
    quick._thread.join(10)
    assert seen[0] and not seen[-1] and not quick.waits_for_threads
    assert len(set(released)) == 2 and len(released) == 1 + len(seen), "its own are ended after each look"


def test_a_call_lets_it_have_threads_only_while_it_waits_for_them(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast, region, x = hurried()
    released: list[int] = []
    monkeypatch.setattr(module, "release_team", lambda: released.append(1))
    monkeypatch.setattr(module, "RELEASE_SECONDS", 0.0)
    monkeypatch.setattr(later, "waits_for_threads", False)
    fast(x)
    assert not released
    monkeypatch.setattr(later, "waits_for_threads", True)
    fast(x)
    assert released == [1]
    region.programs.provisional.clear()
    fast(x)
    assert released == [1]


def test_an_error_is_not_repeated(quick: Later, caplog: pytest.LogCaptureFixture) -> None:
    runs: list[int] = []

    def improve(interrupted: Callable[[], bool]) -> bool:
        runs.append(1)
        raise RuntimeError("boom")

    fake = Fake(improve)
    quick.add(fake)
    assert fake.done.wait(10)
    time.sleep(0.3)
    quick.stop()
    assert runs == [1] and "measuring later failed" in caplog.text


def test_stopping_ends_it_at_once(quick: Later, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_SECONDS", 60.0)
    quick.add(Fake(lambda interrupted: True))
    quick.stop()
    assert quick._thread is not None and not quick._thread.is_alive()


def test_between_looks_the_thread_holds_nothing(quick: Later, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that nobody has any longer is freed at once, its weights with it."""
    looked, over = threading.Event(), threading.Event()
    pauses: list[float] = []

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        if len(pauses) == 1:
            return False
        looked.set()  # the pause after the first look
        over.wait(30)
        return True

    monkeypatch.setattr(module, "QUIET_SECONDS", 0.0)  # it does not wait there
    monkeypatch.setattr(quick._ended, "wait", wait)
    fake = Fake(lambda interrupted: False)
    left = weakref.ref(fake)
    quick.add(fake)
    assert looked.wait(10) and fake.done.is_set()
    del fake
    gc.collect()
    assert left() is None
    over.set()
    quick.stop()


def test_without_the_library_a_region_is_plain_pytorch(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a module that was pickled elsewhere is loaded."""
    model = net(lambda m, x: F.relu(m[0](x)), nn.Conv2d(16, 16, 3, padding=1))
    fast: Any = zendnn_cffi.optimize(model)
    (region,) = fast.regions().values()
    monkeypatch.setattr("fx_passes.region.region.is_available", lambda: False)
    monkeypatch.setattr("fx_passes.region.region.unavailable_reason", lambda: "there is none")
    monkeypatch.setattr("fx_passes.region.variants.database_of", lambda mode, threads: 1 / 0)
    x = noise(2, 16, 8, 8)
    torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)
    (signature,) = region.lowered
    assert region.lowered[signature] is None and region.reason(signature) == "there is none"


def test_a_call_that_lowers_meanwhile_is_not_waited_for(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the region's lock, and waits until nothing is made: who makes something gives up."""
    _, _, region, _ = hurried()
    lower = region._try_lower
    monkeypatch.setattr(region, "_try_lower", lambda *args: (*lower(*args)[:2], False))
    first, locked = program(region), threading.Event()

    def call() -> None:
        with region._lock:
            locked.set()
            with making():
                pass

    ((signature, inputs),) = waiting(region).items()
    thread = threading.Thread(target=call)
    with making():
        thread.start()
        assert locked.wait(10)
        assert not region._lower_anew(signature, inputs)
    thread.join(10)
    assert not thread.is_alive() and program(region) is first
    assert region._lower_anew(signature, inputs) and program(region) is not first


def test_weights_that_change_while_it_is_lowered_forget_it(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fast, region, x = hurried()
    lower = region._try_lower

    def changing(*args: Any) -> Any:
        found = lower(*args)
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        fast.invalidate()
        return found

    monkeypatch.setattr(region, "_try_lower", changing)
    ((signature, inputs),) = waiting(region).items()
    region._lower_anew(signature, inputs)
    assert not region.lowered and not region.programs.provisional
    monkeypatch.undo()
    torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)


def waiting(region: ZenRegion) -> dict[Any, list[torch.Tensor]]:
    return {signature: [made_up(spec) for spec in specs] for signature, specs in region.programs.provisional.items()}
