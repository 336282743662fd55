"""Plain calls wait while another thread traces, and tracing until those that run have ended."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fx_passes import plain_calls
from fx_passes.plain_calls import PlainCalls, Reasons


def started(target: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=target)
    thread.start()
    return thread


def test_a_call_waits_until_tracing_is_over() -> None:
    calls, order = PlainCalls(), list[str]()

    def call() -> None:
        with calls.one():
            order.append("call")

    with calls.none() as is_alone:
        assert is_alone
        thread = started(call)
        thread.join(0.05)
        order.append("traced")
        with calls.one():  # the forward that is traced
            order.append("own")
    thread.join()
    assert order == ["traced", "own", "call"]


def test_a_call_in_which_a_child_was_forked_ends_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = PlainCalls()
    with calls.one():
        monkeypatch.setattr(os, "getpid", lambda: -1)  # as in the child, whose next call begins anew
        with calls.one():
            pass
    with calls.none() as is_alone:
        assert is_alone


def test_tracing_waits_for_calls_that_run() -> None:
    calls, order, inside, go_on = PlainCalls(), list[str](), threading.Event(), threading.Event()

    def call() -> None:
        with calls.one():
            inside.set()
            assert go_on.wait(30)
            with calls.one():  # one in another, while somebody waits to trace
                order.append("call")

    def trace() -> None:
        with calls.none() as is_alone:
            order.append(f"traced {is_alone}")

    calling = started(call)
    assert inside.wait(30)
    tracing = started(trace)
    tracing.join(0.05)
    go_on.set()
    calling.join()
    tracing.join()
    assert order == ["call", "traced True"]


def test_one_thread_traces_at_a_time() -> None:
    calls = PlainCalls()
    found: list[bool] = []

    def trace() -> None:
        with calls.none() as is_alone:
            found.append(is_alone)

    with calls.none():
        started(trace).join()
    started(trace).join()
    assert found == [False, True]


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_calls, "_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(plain_calls, "_LONGEST_SECONDS", 0.01)
    calls, inside, go_on = PlainCalls(), threading.Event(), threading.Event()

    def call() -> None:
        with calls.one():
            inside.set()
            assert go_on.wait(30)

    thread = started(call)
    assert inside.wait(30)
    with calls.none() as is_alone:
        assert not is_alone
        started(lambda: calls.one().__enter__()).join(30)
    go_on.set()
    thread.join()


def test_a_raising_call_has_ended() -> None:
    calls = PlainCalls()
    with pytest.raises(ValueError, match="own"), calls.one():
        raise ValueError("own")
    with calls.none() as is_alone:
        assert is_alone


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    calls = PlainCalls()
    with calls.none():
        calls._traced_in += 1  # another thread's
        child = os.fork()
        if not child:
            with calls.one():
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


def test_reasons_are_counted_the_latest_last() -> None:
    reasons = Reasons()
    assert [reasons.add(why) for why in ("a", "b", "a")] == [True, True, False]
    assert reasons.texts == ["b", "a"] and reasons.counted == "b; a (2 calls)"
    for number in range(plain_calls._MOST_REASONS):
        reasons.add(str(number))
    assert reasons.texts == list(map(str, range(plain_calls._MOST_REASONS)))
