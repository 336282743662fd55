"""The calls that one process has, and those that it gets next.

    calls that wait  --take-->  taken: [sent, sent | not sent yet]  --receive-->  futures

The process is given the next call before it has answered the last. Where it ends, another one takes its place: what it
had is sent again, its first call alone, which may be what ended it.
"""

from __future__ import annotations

import queue
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

from zendnn_cffi.log import get_logger
from zendnn_cffi.serving.process import Worker
from zendnn_cffi.serving.wire import UNDER_WAY, Ended

log = get_logger(__name__)

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
Calls: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], Call] | None]"  # None, for each process: there are no more
_MOST_DEATHS = 2  # of processes, at one call


class WorkerDied(RuntimeError):
    """Two workers ended in the midst of the same call."""


@dataclass(eq=False)
class _Taken:
    """A call without an answer; deaths: how many processes ended at it."""

    future: Future[Any]
    call: Call
    deaths: int = 0


def settle(future: Future[Any], right: bool, answer: Any) -> None:
    """Give a future its result, or what was raised. It calls functions of the user's: what these raise ends nothing."""
    try:
        if right:
            future.set_result(answer)
        else:
            future.set_exception(answer)
    except BaseException:  # concurrent.futures takes care of Exception alone: asyncio's CancelledError is none
        log.exception("a callback of a call raised")


class UnderWay:
    """The calls of one process. serve() is for one thread; pid and replaced are for any.

    calls    those that wait, for all processes
    workers  how many processes take from there
    worker   the process of now
    """

    def __init__(self, calls: Calls, workers: int, worker: Worker) -> None:
        self._calls, self._workers = calls, workers
        self._worker: Worker | None = worker
        self._path, self._cores = worker.path, worker.cores
        self._taken: list[_Taken] = []  # the oldest first
        self._sent = 0  # of these, to the process of now
        self._is_last = False  # whether no more will come
        self.replaced = 0

    @property
    def pid(self) -> int | None:
        """The process of now; None while there is none."""
        worker = self._worker
        return None if worker is None else worker.process.pid

    def serve(self) -> None:
        """Have calls answered until there are no more; then end the process."""
        while self._take():
            try:
                self._send()
                self._receive()
            except Ended:
                self._bury()
            except BaseException as error:  # no other process starts
                settle(self._taken.pop(0).future, False, error)
        if self._worker is not None:
            self._worker.close()

    def _take(self) -> bool:
        """Take calls as long as this process is to have more; False where all are answered and no more will come."""
        while not self._is_last and len(self._taken) < UNDER_WAY:
            if self._taken and self._calls.qsize() < self._workers:
                break  # others are as near to being free
            try:
                found = self._calls.get(block=not self._taken)
            except queue.Empty:  # another process was faster
                break
            if found is None:
                self._is_last = True
            elif found[0].set_running_or_notify_cancel():
                self._taken.append(_Taken(*found))
            del found  # nothing is held while it waits
        return bool(self._taken)

    def _send(self) -> None:
        """Give the process what was taken; one that ended a process before is given alone."""
        while self._sent < len(self._taken) and not (self._sent and self._taken[0].deaths):
            if self._worker is None:
                self._worker = Worker(self._path, self._cores)
            error = self._worker.ask(*self._taken[self._sent].call)
            if error is None:
                self._sent += 1
            else:
                settle(self._taken.pop(self._sent).future, False, error)

    def _receive(self) -> None:
        """Wait for the answer to the oldest call, where there is one."""
        if not self._sent:
            return
        assert self._worker is not None
        right, answer = self._worker.answer()
        future = self._taken.pop(0).future
        self._sent -= 1
        settle(future, right, answer)

    def _bury(self) -> None:
        """The process ended: what it was at is asked once more, of another one."""
        assert self._worker is not None
        self._worker.close()
        status, pid = self._worker.process.returncode, self._worker.process.pid
        self._worker, self._sent = None, 0
        self.replaced += 1
        log.warning("worker %d ended with status %s: another takes its place", pid, status)
        self._taken[0].deaths += 1
        if self._taken[0].deaths == _MOST_DEATHS:
            why = f"the call ended two workers, the last with status {status}: it is not tried again"
            settle(self._taken.pop(0).future, False, WorkerDied(why))
