"""Calls from several threads: each ends the OpenMP threads that it computed with.

Every thread that calls has OpenMP threads of its own, which stay. Those of two callers are more than there are cores,
and then all of them sleep between loops (zendnn_cffi.engine.openmp.release_team). A server that calls from a pool of
threads, one call at a time, waited 6.4 ms for a MobileNetV2 that takes 2.7 (float32, 2 threads, an Intel Xeon with
AVX-512). So calls of who is not alone end their threads, which takes 0.12 ms. The main thread is asked to end its own.
"""

from __future__ import annotations

import os
import threading

from zendnn_cffi.engine.openmp import release_main_team, release_team
from zendnn_cffi.locks import OneForEachProcess
from zendnn_cffi.runtime.program import Program
from zendnn_cffi.runtime.sliced_program import SlicedProgram

_IN_A_ROW = 64  # calls by one thread: then it is alone
_CALLS_PER_THREAD = 4  # of a program, each a loop or more: with fewer, waking threads costs less than making them
_MOST_KNOWN = 1024


class Callers(OneForEachProcess):
    """Who calls programs. One for each process.

    alone  the number of the thread that has called last, and for long; the main thread at first; 0 for none
    """

    def _begin_anew(self) -> None:
        self._main = self.alone = self._last = threading.main_thread().ident or 0
        self._left = 0
        self._known = {self._main}
        self._cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def called(self, caller: int, program: Program | SlicedProgram, threads: int) -> None:
        """A call of a program with so many threads, by who is not known to be alone, has ended."""
        if caller != self._last:
            if len(self._known) < _MOST_KNOWN:
                self._known.add(caller)
            self._last, self._left, self.alone = caller, _IN_A_ROW, 0
            if caller != self._main and self._are_too_many(threads):
                release_main_team()
        self._left -= 1
        if self._left <= 0:
            self.alone = caller
        elif (
            len(program.calls) >= _CALLS_PER_THREAD * threads
            and self._are_too_many(threads)
            and not program.is_running  # beside a call that runs, threads sleep in any case
        ):
            release_team()

    def _are_too_many(self, threads: int) -> bool:
        """Whether the threads of all callers would be more than there are cores."""
        return threads > 1 and threads * len(self._known) > self._cpus


callers = Callers()
