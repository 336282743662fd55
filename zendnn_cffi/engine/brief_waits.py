"""OpenMP's threads leave their core soon while they wait, where other processes want it.

GNU OpenMP lets a thread that waits for work, or for the others at a loop's end, turn in a circle for milliseconds.
Where processes start beside each other, that is half of what they compute. It turns for microseconds only while it
has more threads than there are cores. So a thread of ours has it make some more, which sleep, for as long as needed.

Four processes of two threads on two cores of a Zen 4 EPYC, each loads a ResNet-50 (float32, batch 1) and calls it: the
last answers after 1.5 s, and after 0.6 with brief waits. Alone they cost: a call takes 39 ms in place of 35, one of
MobileNetV2 6.2 in place of 3.9, as waking a thread takes long in a virtual machine.

Later calls lose more. Of two processes of two threads on two cores of a Zen 3 EPYC, each called one convolution 150 to
4,400 times a second, and does so 6,400 to 9,800 times with brief waits.
"""

from __future__ import annotations

import math
import os
import threading
import time
from typing import Any

from zendnn_cffi.engine.contention import runnable_elsewhere, thread_ran_and_waited_ns, thread_waited_ns
from zendnn_cffi.engine.host import usable_cpus
from zendnn_cffi.engine.openmp import make_team
from zendnn_cffi.locks import OneForEachProcess, begun, new_lock

LINGERING_SECONDS = 1.5  # after a start that waited for cores: those beside it want them, too
STARTING_SECONDS = 60.0  # of a start, at most
_WAITED_SHARE = 0.1  # of a start's time without a core: then lingering pays
LOOK_SECONDS = 0.1  # between two looks at whether calls wait for cores
_ENOUGH_NS = 50_000_000  # of a thread's time between two looks: what less tells is chance
_CROWDED_SHARE = 0.25  # of a caller's time without a core; 0.5 where two processes have as many threads as cores
_LOOKS = 2  # in a row: who needs a core now and then is no reason
_LONGEST_SECONDS = 6.0  # with brief waits before a look at whether they are needed
_SOON_SECONDS = 1.0  # after they ended: who waits for cores by then waits for the same processes
_LARGEST_TEAM = 8
_CHOSEN_BY_USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


class _Sleepers:
    """What a thread of ours holds; until: when it gives them up. changed: it is to look at that again."""

    def __init__(self) -> None:
        self.until = 0.0
        self.changed = threading.Event()
        self.thread: threading.Thread | None = None

    def keep_until(self, until: float) -> None:
        self.until = until
        self.changed.set()


class BriefWaits(OneForEachProcess):
    """The thread that holds the sleeping ones, which exists while it is needed. One for each process."""

    def _begin_anew(self) -> None:
        self._lock: Any = new_lock()
        self._sleepers: _Sleepers | None = None

    @property
    def are_on(self) -> bool:
        """Whether threads wait briefly just now."""
        return self._sleepers is not None

    def keep(self, threads: int, seconds: float) -> None:
        """Let threads wait briefly for so long from now on: it replaces what was asked before.

        threads  how many compute in this process
        Nothing happens where the user chose how threads wait, or where there are many more cores than threads.
        """
        size = len(os.sched_getaffinity(0)) - threads + 2
        if threads < 2 or not 2 <= size <= _LARGEST_TEAM or any(name in os.environ for name in _CHOSEN_BY_USER):
            return
        with self._lock:
            until = time.monotonic() + seconds
            if self._sleepers is not None:
                self._sleepers.keep_until(until)
                return
            self._sleepers = made = _Sleepers()
            made.keep_until(until)
            made.thread = begun(self._run, "brief waits", made, size)
            if made.thread is None:
                self._sleepers = None

    def stop(self) -> None:
        """Let threads wait as ever from now on. A start that asks meanwhile has another thread: this one ends."""
        with self._lock:
            ended, self._sleepers = self._sleepers, None
            if ended is None:
                return
            ended.keep_until(0.0)
        if ended.thread is not None and ended.thread is not threading.current_thread():
            ended.thread.join()

    def _run(self, sleepers: _Sleepers, size: int) -> None:
        make_team(size)
        while True:
            sleepers.changed.wait(max(0.0, sleepers.until - time.monotonic()))
            with self._lock:
                sleepers.changed.clear()
                if time.monotonic() >= sleepers.until:
                    if self._sleepers is sleepers:
                        self._sleepers = None
                    return


brief_waits = BriefWaits()


class Start:
    """A start of so many threads: beside other work these wait briefly, and go on to where it was long without a core.

    Use it as a context manager.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __enter__(self) -> Start:
        self._is_beside_others = self._threads > 1 and self._threads + runnable_elsewhere() > usable_cpus()
        if self._is_beside_others:
            self._begun, self._waited_ns = time.monotonic(), thread_waited_ns()
            brief_waits.keep(self._threads, STARTING_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_beside_others:
            return
        waited = (thread_waited_ns() - self._waited_ns) / 1e9
        if brief_waits.are_on and waited > _WAITED_SHARE * (time.monotonic() - self._begun):
            brief_waits.keep(self._threads, LINGERING_SECONDS)
        else:
            brief_waits.stop()


class Crowding(OneForEachProcess):
    """Whether the threads that call have cores: where they wait for them, OpenMP's threads wait briefly for a while.

    next_look  time.monotonic() from which on a call is to look again
    """

    def _begin_anew(self) -> None:
        self.next_look = 0.0
        self._thread = self._ran_ns = self._waited_ns = self._in_a_row = 0
        self._kept_seconds = LINGERING_SECONDS
        self._kept_until = -math.inf

    def look(self, threads: int) -> None:
        """Find out for how much of its time the calling thread had no core since it looked last.

        threads  how many compute in this process
        Brief waits hide what they are for. So they end, and last longer where others are found there still.
        """
        now, caller = time.monotonic(), threading.get_ident()
        self.next_look = now + LOOK_SECONDS
        if threads < 2:
            return
        if brief_waits.are_on:
            self._thread = self._in_a_row = 0  # what it waits meanwhile is no reason to go on
            return
        ran_ns, waited_ns = thread_ran_and_waited_ns()
        ran, waited = ran_ns - self._ran_ns, waited_ns - self._waited_ns
        is_same = caller == self._thread and ran >= 0 and waited >= 0  # an ended thread's number is given again
        if is_same and ran + waited < _ENOUGH_NS:
            return
        is_crowded = is_same and waited > _CROWDED_SHARE * (ran + waited)
        self._in_a_row = self._in_a_row + 1 if is_crowded else 0
        self._thread, self._ran_ns, self._waited_ns = caller, ran_ns, waited_ns
        if self._in_a_row >= _LOOKS:
            is_still = now < self._kept_until + _SOON_SECONDS
            self._kept_seconds = min(2 * self._kept_seconds, _LONGEST_SECONDS) if is_still else LINGERING_SECONDS
            self._kept_until = now + self._kept_seconds
            brief_waits.keep(threads, self._kept_seconds)


crowding = Crowding()
