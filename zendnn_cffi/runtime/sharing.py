"""Run a program with fewer threads while other work takes cores away.

A program is many short parallel loops. Beside other work each of them waits for the thread that was pushed off its
core: ResNet-50 on two cores of a Zen 5 EPYC takes 20 ms alone and 70 beside one busy loop, on one thread 32 and 33.

    alone --slow, and pushed off cores--> trying fewer --faster--> shared --now and again--> trying all
      ^                                        |                      ^                           |
      +--------------- not faster -------------+                      +-------- not faster -------+-- faster --> alone

Each is tried for a while without a break: who computed little lately is given his core at once, for a few calls. Both
programs give the same bits (zendnn_cffi.runtime.other_threads), so that nobody sees which one ran.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Sequence

import torch

from zendnn_cffi.engine.contention import involuntary_switches, runnable_elsewhere, threads_left
from zendnn_cffi.engine.openmp import computing_with
from zendnn_cffi.locks import making, new_lock
from zendnn_cffi.primitives.verification.unchecked import unchecked
from zendnn_cffi.runtime.other_threads import for_threads
from zendnn_cffi.runtime.program import Program
from zendnn_cffi.runtime.sliced_program import SlicedProgram

log = logging.getLogger("zendnn_cffi.region")

# Involuntary context switches of two threads: 40 to 80 in a second of a quiet machine, 140 to 260 beside a busy loop.
SWITCHES_PER_SECOND = 60.0
SLOWER = 1.2  # than the fastest call of late: then switches tell of other work
CLEARLY_FASTER = 0.9
_TRIAL_NS, _FEWEST_CALLS = 200_000_000, 4  # computing between two looks, and of a trial
_SHARED_SECONDS, _LONGEST_SHARED_SECONDS = 2.0, 30.0  # before all threads are tried again: soon where nobody computes
_SHARE_OF_TRYING = 0.02  # of the time, at most
_FORGETTING = 1.01  # that the fastest call is taken to be slower at each look: clocks and neighbours change
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0  # after fewer threads did not help; it doubles each time


class State(str, enum.Enum):
    """Who computes, and whether it is looked into."""

    ALONE = "alone"
    TRYING_FEWER = "trying fewer"
    SHARED = "shared"
    TRYING_ALL = "trying all"


_WITH_FEWER = (State.TRYING_FEWER, State.SHARED)
_TRYING = (State.TRYING_FEWER, State.TRYING_ALL)


class Sharing:
    """Runs a program, with fewer threads while that is faster because of other work.

    program  for `threads` threads, PyTorch's number in each call
    """

    def __init__(self, program: Program | SlicedProgram, threads: int) -> None:
        self.program, self.threads = program, threads
        self.fewer: tuple[int, Program | SlicedProgram] | None = None
        self.state = State.ALONE
        self._spent_ns = self._calls = 0  # since the last look
        self._fastest_ns = float(1 << 62)
        self._slow_ns = self._shared_ns = 0.0  # of a call with all threads beside other work, with fewer
        self._switches = involuntary_switches()
        self._soon = self._again = self._not_before = 0.0
        self._pause = _PAUSE_SECONDS
        self._lock = new_lock()

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs for these inputs."""
        fewer = self.fewer if self.state in _WITH_FEWER else None
        begun = time.perf_counter_ns()
        if fewer is None:
            outputs = self.program(inputs)
        else:
            with computing_with(fewer[0]):
                outputs = fewer[1](inputs)
        spent_ns = time.perf_counter_ns() - begun
        self._spent_ns += spent_ns
        self._calls += 1
        if spent_ns < self._fastest_ns:
            self._fastest_ns = spent_ns
        if self._is_enough or self.state in _TRYING:
            self._look(inputs)
        return outputs

    @property
    def _is_enough(self) -> bool:
        """Whether there were calls enough since the last look to judge by."""
        return self._spent_ns > _TRIAL_NS and self._calls >= _FEWEST_CALLS

    def _is_worse_than(self, call_ns: float) -> bool:
        """Whether a trial has cost a call of the other program more than that would have: no need to go on."""
        return self._spent_ns > call_ns * (self._calls + 1)

    @property
    def threads_now(self) -> int:
        """How many threads a call takes just now."""
        return self.fewer[0] if self.fewer is not None and self.state in _WITH_FEWER else self.threads

    def close(self) -> None:
        """As Program.close, of both."""
        self.program.close()
        if self.fewer is not None:
            self.fewer[1].close()

    def _look(self, inputs: Sequence[torch.Tensor]) -> None:
        """After a while in one state: which comes next?"""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            mean_ns = self._spent_ns / max(self._calls, 1)
            match self.state:
                case State.ALONE:
                    is_disturbed = self._is_disturbed(mean_ns)
                    self._fastest_ns *= _FORGETTING
                    if is_disturbed and self._has_fewer(inputs):
                        self._slow_ns = mean_ns
                        return self._enter(State.TRYING_FEWER)
                    return self._enter(State.ALONE)
                case State.TRYING_FEWER if self._is_worse_than(self._slow_ns):
                    return self._give_up()
                case State.TRYING_FEWER if self._is_enough:
                    if mean_ns > CLEARLY_FASTER * self._slow_ns:
                        return self._give_up()
                    log.info("other work takes cores: %d of %d threads compute", self.threads_now, self.threads)
                    self._pause, self._shared_ns = _PAUSE_SECONDS, mean_ns
                    return self._share(0.0)
                case State.SHARED:
                    self._shared_ns = mean_ns
                    if self._is_time_to_try_all():
                        return self._enter(State.TRYING_ALL)
                    return self._enter(State.SHARED)
                case State.TRYING_ALL if self._is_worse_than(self._shared_ns):
                    return self._share(self._spent_ns / 1e9)
                case State.TRYING_ALL if self._is_enough:
                    if mean_ns > CLEARLY_FASTER * self._shared_ns:
                        return self._share(self._spent_ns / 1e9)
                    log.info("%d threads compute again", self.threads)
                    return self._enter(State.ALONE)
        finally:
            self._lock.release()

    def _give_up(self) -> None:
        """Fewer threads are no faster."""
        self._not_before = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        self._enter(State.ALONE)

    def _is_time_to_try_all(self) -> bool:
        now = time.monotonic()
        return now > self._again or (now > self._soon and not runnable_elsewhere())

    def _share(self, tried_seconds: float) -> None:
        """Go on with fewer threads; all were tried for so long, 0 where they were not.

        Then they are tried at the next look where nobody else computes: what made calls slow may be over, such as a
        start beside the threads of another caller of this process.
        """
        now = time.monotonic()
        wait = max(_SHARED_SECONDS, min(tried_seconds / _SHARE_OF_TRYING, _LONGEST_SHARED_SECONDS))
        self._soon = now + _SHARED_SECONDS if tried_seconds else now
        self._again = now + wait
        self._enter(State.SHARED)

    def _enter(self, state: State) -> None:
        """Begin a state, or another while of the same."""
        self._spent_ns = self._calls = 0
        self._switches = involuntary_switches()
        self.state = state

    def _is_disturbed(self, mean_ns: float) -> bool:
        """Whether calls took long since the last look while this process's threads were pushed off their cores."""
        if mean_ns < SLOWER * self._fastest_ns or time.monotonic() < self._not_before:
            return False
        return involuntary_switches() - self._switches > SWITCHES_PER_SECOND * self._spent_ns / 1e9

    def _has_fewer(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Make the program for fewer threads, unless it is there."""
        threads = threads_left(self.threads)
        if self.fewer is None or self.fewer[0] != threads:
            try:
                with torch.inference_mode(False), torch.no_grad(), unchecked(), making():
                    made = for_threads(self.program, threads, inputs)
            except Exception:
                log.exception("no program for %d threads", threads)
                made = None
            old, self.fewer = self.fewer, None if made is None else (threads, made)
            if old is not None:
                old[1].close()
        if self.fewer is None:
            self._not_before = float("inf")
        return self.fewer is not None
