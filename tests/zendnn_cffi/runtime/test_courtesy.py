"""Long work waits while programs run, and never for long."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from zendnn_cffi.runtime import arenas, courtesy
from zendnn_cffi.runtime.courtesy import give_way, giving_way


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each pause was; no time passes otherwise."""
    now, found = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        found.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(courtesy.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(courtesy.time, "sleep", sleep)
    return found


def test_nobody_waits_without_a_run(waits: list[float]) -> None:
    with giving_way(lambda: False):
        give_way()
    assert not waits


@pytest.mark.parametrize("is_urgent", [lambda: False, lambda: True])
def test_a_run_is_waited_for_unless_somebody_waits_for_the_work(
    waits: list[float], is_urgent: Callable[[], bool]
) -> None:
    arena = arenas.taken(4096)
    try:
        give_way()
        assert not waits, "no thread that asked for it"
        with giving_way(is_urgent):
            give_way()
            assert bool(waits) is not is_urgent()
            assert sum(waits) < 2 * courtesy.LONGEST_WAIT_SECONDS
            count = len(waits)
            give_way()
            assert len(waits) == count, "a slice of work comes first"
    finally:
        arena.give_back()


def test_it_goes_on_when_the_run_is_over(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    arena, sleep = arenas.taken(4096), courtesy.time.sleep

    def sleep_till_the_run_ends(seconds: float) -> None:
        sleep(seconds)
        if len(waits) == 3:
            arena.give_back()

    monkeypatch.setattr(courtesy.time, "sleep", sleep_till_the_run_ends)
    with giving_way(lambda: False):
        give_way()
    assert len(waits) == 3
    assert sum(waits) < courtesy.LONGEST_WAIT_SECONDS
    assert not arenas.are_in_use()
