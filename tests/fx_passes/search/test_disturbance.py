"""Times measured while other work ran serve the process that measured them and no other."""

from __future__ import annotations

import io
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from fx_passes.candidates.candidates import Candidate
from fx_passes.search import disturbance
from fx_passes.search.database import CHECKED, Database, Result
from fx_passes.search.disturbance import measuring
from fx_passes.search.measure import Bench, fingerprint
from fx_passes.search.tuner import database_for
from fx_passes.search.turn import Turn
from tests.support.lowering import net, noise
from zendnn_cffi.engine import contention

TIME, WRONG = Result(5.0, 0.0, True), Result(float("inf"), 1.0, False)


def counting(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Each look at the counter finds `step` more switches."""
    counts = itertools.count(0, step)
    monkeypatch.setattr(disturbance, "involuntary_switches", lambda: next(counts))


def kept(folder: Path) -> Database:
    return Database("machine", folder)


def is_kept(folder: Path, patch: pytest.MonkeyPatch, seconds: float) -> bool:
    """Whether a time goes to disk that took so many seconds to measure."""
    database, clock = Database("machine", folder), [100.0, 100.0 + seconds]
    patch.setattr(disturbance.time, "perf_counter", lambda: clock.pop(0))
    with measuring(database):
        database.put("time", TIME)
    database.save()
    return kept(folder).get("time") == TIME


def test_threads_that_end_meanwhile_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading of one that ends after its file was opened says so: what the others waited counts nevertheless."""

    class Ended:
        def __enter__(self) -> Ended:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read(self) -> bytes:
            raise ProcessLookupError(3, "No such process")

    def opened(path: str, mode: str) -> Any:
        return Ended() if "/task/7/" in path else io.BytesIO(b"1 42 3\n")

    monkeypatch.setattr(contention.os, "listdir", lambda path: ["5", "7", "9"])
    monkeypatch.setattr(contention, "open", opened, raising=False)
    assert contention.waited_ns() == {"5": 42, "9": 42}


@pytest.mark.parametrize(("step", "known"), [(0, True), (4, True), (10**6, False)], ids=["quiet", "few", "busy"])
def test_times_go_to_disk_unless_disturbed(
    step: int, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database("machine", tmp_path)
    counting(monkeypatch, step)
    database.put("before", TIME)
    with measuring(database):
        database.put("time", TIME)
        database.put("wrong", WRONG)
    database.save()
    assert database.get("time") == TIME, "this process uses it"
    again = kept(tmp_path)
    assert (again.get("time") == TIME) is known
    assert again.get("before") == TIME and again.get("wrong") is not None, (
        "wrong numbers are wrong on a busy machine too"
    )


def test_that_numbers_are_right_stays_where_the_time_is_doubted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database("machine", tmp_path)
    counting(monkeypatch, 10**6)
    with measuring(database):
        database.put("candidate", TIME, is_verdict=True)
        database.put("reorder", TIME)
        database.put(f"{CHECKED}other", TIME, is_verdict=True)
    database.save()
    again = kept(tmp_path)
    assert again.measured().keys() == {f"{CHECKED}candidate", f"{CHECKED}other"}
    assert again.verdict("candidate") == again.verdict("other") == TIME
    assert again.get("candidate") is again.verdict("reorder") is None


def test_the_limit_is_a_rate_for_each_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for factor, known in ((0.9, True), (1.1, False)):
        switches = [0, int(factor * disturbance.SWITCHES_LIMIT * 10 * torch.get_num_threads())]
        with monkeypatch.context() as patch:
            patch.setattr(disturbance, "involuntary_switches", lambda s=switches: s.pop(0))
            assert is_kept(tmp_path / str(factor), patch, 10.0) is known


@pytest.mark.parametrize(
    ("waited_s", "known"), [(0.0, True), (1.9, True), (2.1, False), (9.0, False)], ids=lambda given: str(given)
)
def test_the_longest_wait_of_a_thread_decides(
    waited_s: float, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ten seconds. Threads that ended or began meanwhile count as far as they are known; switches do not."""
    counting(monkeypatch, 10**6)
    looks = [{"1": 7, "2": 10**12, "3": 5}, {"1": 7, "2": 10**12 + int(waited_s * 1e9), "4": 10**6}]
    with monkeypatch.context() as patch:
        patch.setattr(disturbance, "waited_ns", lambda: looks.pop(0))
        assert is_kept(tmp_path, patch, 10.0) is known


def test_a_single_wait_of_a_short_time_is_no_busy_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for waited, known in ((4 * 10**6, True), (8 * 10**6, False)):
        looks = [{"1": 0}, {"1": waited}]
        with monkeypatch.context() as patch:
            patch.setattr(disturbance, "waited_ns", lambda s=looks: s.pop(0))
            assert is_kept(tmp_path / str(waited), patch, 0.004) is known


def test_an_error_while_measuring_keeps_nothing_doubtful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database("machine", tmp_path)
    counting(monkeypatch, 10**6)
    with pytest.raises(KeyError), measuring(database):
        database.put("time", TIME)
        raise KeyError
    database.save()
    assert kept(tmp_path).get("time") is None


def test_a_doubtful_time_leaves_a_sure_one_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database("machine", tmp_path)
    database.put("time", TIME)
    database.save()
    counting(monkeypatch, 10**6)
    with measuring(database):
        database.put("time", Result(500.0, 0.0, True))
    database.save()
    assert kept(tmp_path).get("time") == TIME


@pytest.fixture
def first_call() -> Callable[[], None]:
    model = net(
        lambda m, x: m[1](torch.cat([F.relu(m[0](x)), x], 1)), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(32, 16, 1)
    )
    x = noise(2, 16, 8, 8)

    def run() -> None:
        database_for.cache_clear()  # as in a new process
        fast = zendnn_cffi.optimize(model, tune_seconds=100)  # however slow the machine is just now
        torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)

    return run


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Which operations and candidates were run."""
    runs: list[tuple[str, str]] = []
    check = Bench.check_and_time

    def noted(self: Bench, candidate: Candidate, *args: Any) -> Result:
        runs.append((self.operation.name, fingerprint(candidate)))
        return check(self, candidate, *args)

    monkeypatch.setattr(Bench, "check_and_time", noted)
    return runs


def test_the_next_process_measures_again_what_was_disturbed(
    fresh: Path,
    first_call: Callable[[], None],
    measured: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as busy, caplog.at_level(logging.INFO, logger="zendnn_cffi.search"):
        counting(busy, 10**6)
        first_call()
    assert "on a busy machine" in caplog.text
    known = database_for(torch.get_num_threads()).as_kept().measured()
    assert known and all(key.startswith(CHECKED) for key in known), "verdicts, no times"
    once = {name for name, _ in measured}
    measured.clear()
    first_call()
    assert {name for name, _ in measured} == once != set(), "on a quiet machine every operation was measured again"
    measured.clear()
    first_call()
    assert not measured, "and remembered"


def test_the_next_process_on_a_busy_machine_compares_no_numbers_again(
    fresh: Path, first_call: Callable[[], None], measured: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that start on a busy machine, where no time is kept, would each check every layer's numbers."""
    counting(monkeypatch, 10**6)
    first_call()
    once = set(measured)
    monkeypatch.setattr(Turn, "_begin", lambda turn: turn.close("the machine is busy"))  # not one time is measured
    for _ in range(2):
        measured.clear()
        first_call()
        assert once and not once & set(measured)
        once |= set(measured)


@pytest.mark.parametrize(
    ("look", "least"),
    [("involuntary_switches()", 5), ("max(waited_ns().values())", 10**8)],
    ids=["switches", "waiting"],
)
def test_both_look_at_all_threads_of_the_process(look: str, least: int) -> None:
    """Two busy threads of C on one core push each other off it; neither is the thread that asks."""
    code = f"""
import os, threading, time, zlib
from zendnn_cffi.engine.contention import involuntary_switches, waited_ns
core = min(os.sched_getaffinity(0))
found = 0
def work():
    global found
    os.sched_setaffinity(0, {{core}})
    data, end = bytes(1 << 20), time.monotonic() + 1
    while time.monotonic() < end:
        zlib.compress(data)  # without the interpreter's lock
    found = max(found, {look})
before = {look}
workers = [threading.Thread(target=work) for _ in range(2)]
[w.start() for w in workers]
[w.join() for w in workers]
assert found - before > {least}, found - before
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ}, timeout=60)
