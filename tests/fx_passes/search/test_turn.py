"""One process measures at a time, for a limited time, on CPUs of its own."""

from __future__ import annotations

import errno
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from fx_passes.search import disturbance, turn
from fx_passes.search.database import Database, Result
from fx_passes.search.tuner import database_for
from fx_passes.search.turn import Turn
from tests.support.lowering import net, noise

TIME = Result(5.0, 0.0, True)


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database("machine", tmp_path)


@contextmanager
def measuring_process(folder: Path, seconds: float, key: str = "") -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock of a folder, says so, and may leave a result before it gives the lock back."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom fx_passes.search.database import Database, Result\n"
        "from fx_passes.search.turn import Turn\n"
        f"database = Database('machine', Path({str(folder)!r}))\n"
        "with Turn(database, 1) as turn:\n    assert turn.allows()\n    print('begun', flush=True)\n"
        f"    time.sleep({seconds})\n"
        f"    if {key!r}:\n        database.put({key!r}, Result(5.0, 0.0, True))\n        database.save()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_time_runs_from_the_first_unknown_and_is_shared_out(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(turn.time, "perf_counter", lambda: now[0])
    with Turn(database, 1, seconds=1.0) as leave:
        now[0] = 200.0
        assert leave.allows(0.5) and not leave.left_out
        now[0] = 200.6
        assert not leave.allows(0.5)
        assert leave.allows(), "other parts have the rest"
        assert not leave.allows(needed=0.5), "which is too little for this"
        leave.give_time(0.5)
        assert not leave.allows(0.5), "it never gets less"
        leave.give_time(10.0)
        assert leave.allows(0.5)
        now[0] = 210.1
        assert not leave.allows()
    assert leave.left_out == 4 and leave.reason == "it is over"


def test_a_measurement_inside_another_is_part_of_it(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def waited_ns() -> dict[int, int]:  # one thread waits 10 s from one look to the next
        nonlocal asked
        asked += 1
        return {1: asked * 10**10}

    monkeypatch.setattr(disturbance, "waited_ns", waited_ns)
    leave = Turn(database, 1)
    for number in range(1, turn.MOST_DISTURBED + 1):
        assert leave.allows()
        with leave.measuring() as outer:
            for _ in range(5):
                with leave.measuring() as inner:
                    assert inner is outer
        assert outer.disturbed and asked == 2 * number
    assert leave.reason == "the machine is busy"


def test_one_of_several_has_no_more_than_was_asked_for(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(turn.time, "perf_counter", lambda: now[0])
    leave = Turn(database, 1, seconds=1.0)
    leave.is_one_of_several = True
    leave.give_time(10.0)
    assert leave.allows()
    now[0] = 101.5
    assert not leave.allows()
    leave.leave_out()
    assert leave.left_out == 2
    leave.close("it is over")


def test_no_time_is_none_however_large_the_network(database: Database) -> None:
    leave = Turn(database, 1, seconds=0.0)
    leave.give_time(10.0)
    assert not leave.allows() and leave.reason == "no time is given"


def test_more_threads_than_cpus_measure_nothing(database: Database) -> None:
    leave = Turn(database, 10**6, seconds=1.0)
    assert not leave.allows() and "1000000 threads share" in leave.reason
    assert Turn(database, 10**6, insists=True).allows()


@pytest.mark.parametrize(("seconds", "begins"), ((1.0, 1), (0.0, 0)))
def test_the_first_measurement_is_told_of_once(database: Database, seconds: float, begins: int) -> None:
    told: list[int] = []
    with Turn(database, 1, seconds) as leave:
        leave.on_begin = lambda: told.append(1)
        assert not told
        assert leave.allows() == leave.allows() == bool(begins)
    assert len(told) == begins


def test_an_interruption_ends_it(database: Database) -> None:
    answers = iter((False, True))
    leave = Turn(database, 1, interrupted=lambda: next(answers))
    assert leave.allows() and not leave.allows()
    assert not leave.allows() and leave.reason == "a call came"


def test_who_is_interrupted_does_not_wait(database: Database, tmp_path: Path) -> None:
    with measuring_process(tmp_path, 60.0):
        began = time.perf_counter()
        leave = Turn(database, 1, interrupted=lambda: True)
        assert not leave.allows() and leave.reason == "a call came"
        assert time.perf_counter() - began < turn.PATIENCE_SECONDS


@pytest.mark.parametrize("insists", (False, True))
def test_a_busy_machine_ends_it_unless_it_insists(
    insists: bool, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = itertools.count(0, 10**6)
    monkeypatch.setattr(disturbance, "involuntary_switches", lambda: next(counts))
    with Turn(database, 1, insists=insists) as leave:
        for _ in range(turn.MOST_DISTURBED):
            assert leave.allows()
            with leave.measuring():
                database.put("time", TIME)
        assert leave.allows() is insists
    database.save()
    assert len(Database("machine", database.path.parent if database.path else None)) == 0


@pytest.mark.parametrize("insists", (False, True))
def test_beside_threads_of_another_caller_times_are_of_this_process(
    insists: bool, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They make each loop wait: no reason to stop, but nothing for the file."""
    monkeypatch.setattr(turn, "team_sleeps", lambda threads: True)
    with Turn(database, 2, insists=insists) as leave:
        for number in range(turn.MOST_DISTURBED + 1):
            assert leave.allows()
            with leave.measuring() as observed:
                database.put(f"time {number}", TIME)
            assert not observed.disturbed and database.get(f"time {number}") == TIME
    database.save()
    assert len(Database("machine", database.path.parent if database.path else None)) == 0


def test_it_waits_for_another_process_and_reads_what_that_found(database: Database, tmp_path: Path) -> None:
    with measuring_process(tmp_path, 0.5, key="found"), Turn(database, 1, seconds=60.0) as leave:
        assert database.get("found") is None
        assert leave.allows()
        assert database.get("found") == TIME


def test_it_does_not_wait_for_ever(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "PATIENCE_SECONDS", 0.1)
    with measuring_process(tmp_path, 60.0) as other:
        leave = Turn(database, 1, seconds=60.0)
        assert not leave.allows() and leave.reason == "another process measures"
        other.send_signal(signal.SIGKILL)
        other.wait()
        with Turn(database, 1, seconds=60.0) as next_one:
            assert next_one.allows(), "the system takes the lock from a process that dies"


def test_the_lock_is_given_back(database: Database) -> None:
    with Turn(database, 1) as first:
        assert first.allows()
    began = time.perf_counter()
    with Turn(database, 1) as second:
        assert second.allows()
    assert time.perf_counter() - began < turn.PATIENCE_SECONDS


@pytest.mark.parametrize("is_there", [True, False], ids=["with the file", "without"])
def test_what_may_only_be_read_is_locked_too(
    is_there: bool, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a folder in an image: processes that start at once do not measure beside each other."""
    if is_there:
        (tmp_path / turn.LOCK_NAME).touch()

    def refuse(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, flags, *mode)

    opened = os.open
    monkeypatch.setattr(turn.os, "open", refuse)
    monkeypatch.setattr(turn, "PATIENCE_SECONDS", 0.1)
    with Turn(database, 1) as first:
        assert first.allows()
        second = Turn(database, 1)
        assert not second.allows() and second.reason == "another process measures"
    with Turn(database, 1) as third:
        assert third.allows()


def test_a_folder_that_cannot_be_made_has_no_lock(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert Turn(Database("machine", tmp_path / "file" / "below"), 1).allows()


def test_without_a_folder_there_is_no_lock() -> None:
    assert Turn(Database("machine", None), 1, seconds=math.inf).allows()


@pytest.mark.parametrize("tune_seconds", (0, 0.0))
def test_a_call_without_time_measures_nothing_and_is_right(tune_seconds: float, fresh: Path) -> None:
    model = net(lambda m, x: m[1](F.relu(m[0](x))), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1))
    x = noise(2, 16, 8, 8)
    fast: Any = zendnn_cffi.optimize(model, tune_seconds=tune_seconds)
    torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)
    (region,) = fast.regions().values()
    (lowered,) = region.lowered.values()
    assert [node.kind for node in lowered.nodes] == ["convolution"] * 2
    database = database_for(torch.get_num_threads())
    assert all(key.startswith("checked ") for key in database._results), "numbers are compared all the same"


@pytest.mark.parametrize(
    ("value", "error"), [(-1, ValueError), (math.nan, ValueError), ("1", TypeError), (True, TypeError)]
)
def test_the_time_must_be_a_number(value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="tune_seconds must be"):
        zendnn_cffi.optimize(nn.Linear(2, 2).eval(), tune_seconds=value)  # type: ignore[arg-type]
