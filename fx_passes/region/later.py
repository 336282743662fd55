"""Measure in a quiet hour what first calls left out.

A first call measures for a second or two, and not at all on a busy machine. What it chose by estimate is provisional. A
thread looks again after a while: once no region was called for two seconds, it measures the rest, and gives up as soon
as a call comes. What another process measured meanwhile it takes over. Only then is the program replaced.

It measures as calls run only while its threads are all that OpenMP has. So a region's first call ends its own threads,
and later ones do once this thread has found them there.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from zendnn_cffi.engine.openmp import release_team, team_sleeps
from zendnn_cffi.locks import OneForEachProcess, begun, is_awaited, making, new_lock

log = logging.getLogger("zendnn_cffi.search")

FIRST_SECONDS, LAST_SECONDS = 5.0, 600.0  # between two looks; it doubles each time
QUIET_SECONDS = 2.0  # without a call
RELEASE_SECONDS = 0.006  # for each thread, between two times that calls end their threads: of two it costs 0.12 ms
_POLL_SECONDS = 0.25


class Improvable(Protocol):
    """What has provisional programs."""

    def calls(self) -> object:
        """Something that every call changes."""

    def improve(self, interrupted: Callable[[], bool]) -> bool:
        """Measure until done or interrupted; whether nothing is provisional any longer."""


class Later(OneForEachProcess):
    """The thread, which exists while something is provisional. One for each process."""

    def __init__(self) -> None:
        super().__init__()
        atexit.register(self.stop)

    def _begin_anew(self) -> None:
        self.waits_for_threads = False  # those of calls make this thread's sleep
        self._released = -math.inf
        self._lock: Any = new_lock()
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def add(self, region: Improvable) -> None:
        """Look at it later."""
        with self._lock:
            self._waiting.add(region)
            if self._thread is None and not self._ended.is_set():
                self._thread = begun(self._run, "later")

    def let_have_threads(self) -> None:
        """After a call: end the threads that it computed with, not so often that it would be felt."""
        now = time.monotonic()
        if now - self._released > RELEASE_SECONDS * torch.get_num_threads():
            self._released = now
            release_team()

    def measure_now(self) -> None:
        """Measure all that waits, in the calling thread, however long it takes; on a busy machine some of it stays."""
        for region in list(self._waiting):
            with making():  # else this object's thread would measure beside it
                if region.improve(lambda: False):
                    self._waiting.discard(region)

    def stop(self) -> None:
        """End the thread, at the latest when what it measures just now is over."""
        self._ended.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        pause = FIRST_SECONDS
        while not self._ended.wait(pause):
            self._look()
            pause = min(2 * pause, LAST_SECONDS)
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return

    def _look(self) -> None:
        """Look at all that wait; nothing holds them afterwards."""
        regions = list(self._waiting)
        for region in regions:
            self._look_at(region, regions)

    def _look_at(self, region: Improvable, regions: Iterable[Improvable]) -> None:
        before = _calls(regions)
        quiet = self._is_quiet(regions, before)

        @functools.cache
        def is_slowed() -> bool:
            self.waits_for_threads = team_sleeps(torch.get_num_threads())
            return self.waits_for_threads

        def interrupted() -> bool:
            return not quiet or self._ended.is_set() or is_awaited() or _calls(regions) != before or is_slowed()

        try:
            with making():
                done = region.improve(interrupted)
        except Exception:
            log.exception("measuring later failed")
            done = True
        finally:
            release_team()  # calls' threads would sleep beside them
        if done:
            self._waiting.discard(region)

    def _is_quiet(self, regions: Iterable[Improvable], before: object) -> bool:
        until = time.monotonic() + QUIET_SECONDS
        while time.monotonic() < until:
            if self._ended.wait(_POLL_SECONDS) or _calls(regions) != before:
                return False
        return True


def _calls(regions: Iterable[Improvable]) -> list[object]:
    return [region.calls() for region in regions]


later = Later()
