"""The calls of one process: in which order it gets them, how many at once, and what becomes of them where it ends."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from zendnn_cffi.serving import under_way
from zendnn_cffi.serving.under_way import Calls, UnderWay, WorkerDied
from zendnn_cffi.serving.wire import UNDER_WAY, Ended


class Process:
    """Stands for a worker: answers x by 2 * x, and notes what it is given. Negative numbers end it, 0 is not sent.

    log  of all processes: ("ask", x), ("answer", x), ("start",) and ("close",)
    """

    path, cores = "module", (0,)
    log: list[tuple[Any, ...]]

    def __init__(self, *_: Any) -> None:
        self.process = SimpleNamespace(pid=7, returncode=-9)
        self._given: list[Any] = []
        self.log.append(("start",))

    def ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BaseException | None:
        if args[0] == 0:
            return TypeError("not pickled")
        self.log.append(("ask", *args))
        self._given += args
        assert len(self._given) <= UNDER_WAY
        return None

    def answer(self) -> tuple[bool, Any]:
        x = self._given.pop(0)
        if x < 0:
            raise Ended("it is gone")
        self.log.append(("answer", x))
        return (True, 2 * x) if x < 100 else (False, ValueError(f"{x} is large"))

    def close(self) -> None:
        self.log.append(("close",))


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> type[Process]:
    monkeypatch.setattr(under_way, "Worker", Process)
    monkeypatch.setattr(Process, "log", [], raising=False)
    return Process


def served(process: Any, numbers: list[int], cancelled: tuple[int, ...] = ()) -> tuple[list[Future[Any]], UnderWay]:
    """Futures of calls with these numbers after all was served."""
    calls: Calls = queue.SimpleQueue()
    futures: list[Future[Any]] = [Future() for _ in numbers]
    for number, future in zip(numbers, futures, strict=True):
        calls.put((future, ((number,), {})))
    for place in cancelled:
        futures[place].cancel()
    calls.put(None)
    made = UnderWay(calls, 1, process())
    made.serve()
    assert calls.empty() and all(future.done() for future in futures)
    return futures, made


def test_the_next_call_is_sent_before_the_last_is_answered(process: type[Process]) -> None:
    futures, made = served(process, [1, 2, 3])
    assert [future.result() for future in futures] == [2, 4, 6] and made.replaced == 0
    wanted = [("ask", 1), ("ask", 2), ("answer", 1), ("ask", 3), ("answer", 2), ("answer", 3)]
    assert process.log == [("start",), *wanted, ("close",)]


def test_a_call_at_which_a_process_ended_is_alone_the_second_time(process: type[Process]) -> None:
    futures, made = served(process, [1, -1, 3, 4])
    with pytest.raises(WorkerDied, match="the last with status -9"):
        futures[1].result()
    assert [futures[place].result() for place in (0, 2, 3)] == [2, 6, 8] and made.replaced == 2
    lost = [("ask", -1), ("answer", 1), ("ask", 3), ("close",), ("start",), ("ask", -1), ("close",), ("start",)]
    assert process.log[2:10] == lost


def test_what_does_not_arrive_or_is_cancelled_leaves_the_others(process: type[Process]) -> None:
    futures, made = served(process, [0, 1, 0, 2, 100, 5, 3], cancelled=(5,))
    for place, error in ((0, TypeError), (2, TypeError), (4, ValueError)):
        with pytest.raises(error):
            futures[place].result()
    assert [futures[place].result() for place in (1, 3, 6)] == [2, 4, 6]
    assert futures[5].cancelled() and made.replaced == 0 and ("ask", 5) not in process.log


def test_all_cancelled(process: type[Process]) -> None:
    served(process, [1, 2], cancelled=(0, 1))
    assert process.log == [("start",), ("close",)]


def test_what_a_callback_raises_ends_nothing(process: type[Process]) -> None:
    """concurrent.futures takes care of Exception alone."""

    def leave(_: Future[Any]) -> None:
        raise SystemExit

    calls: Calls = queue.SimpleQueue()
    futures: list[Future[Any]] = [Future() for _ in range(5)]
    for number, future in enumerate(futures):  # 0 is not sent
        future.add_done_callback(leave)
        calls.put((future, ((number,), {})))
    calls.put(None)
    UnderWay(calls, 1, process()).serve()  # type: ignore[arg-type]
    assert isinstance(futures[0].exception(), TypeError)
    assert [future.result() for future in futures[1:]] == [2, 4, 6, 8]


def test_where_no_other_process_starts_calls_fail_one_by_one(
    process: type[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError("no process")

    first = process()
    monkeypatch.setattr(under_way, "Worker", refuse)
    futures, made = served(lambda: first, [-1, 2])
    for future in futures:
        with pytest.raises(OSError, match="no process"):
            future.result()
    assert made.pid is None and made.replaced == 1


def test_calls_are_left_to_processes_that_are_free(process: type[Process]) -> None:
    """With two processes one keeps a second call only where two wait."""
    calls: Calls = queue.SimpleQueue()
    for number in (1, 2):
        calls.put((Future(), ((number,), {})))
    made = UnderWay(calls, 2, process())  # type: ignore[arg-type]
    thread = threading.Thread(target=made.serve)
    calls.put(None)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert process.log[1:3] == [("ask", 1), ("ask", 2)]  # the second and the end wait: two
    calls.put((Future(), ((3,), {})))
    calls.put(None)
    del process.log[:]
    UnderWay(calls, 3, process()).serve()  # type: ignore[arg-type]
    assert process.log == [("start",), ("ask", 3), ("answer", 3), ("close",)]


def test_answers_are_not_held(process: type[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    class Large:
        pass

    kept: list[weakref.ref[Any]] = []

    def answer(self: Process) -> tuple[bool, Any]:
        self._given.pop(0)
        large = Large()
        kept.append(weakref.ref(large))
        return True, large

    monkeypatch.setattr(Process, "answer", answer)
    calls: Calls = queue.SimpleQueue()
    thread = threading.Thread(target=UnderWay(calls, 1, process()).serve)  # type: ignore[arg-type]
    thread.start()
    future: Future[Any] = Future()
    calls.put((future, ((1,), {})))
    future.result(10)
    del future
    time.sleep(0.2)  # until it waits for the next one
    gc.collect()
    assert kept[0]() is None and thread.is_alive()
    calls.put(None)
    thread.join(10)
