"""Run the contenders of one case side by side: one worker process each, of which only one is ever awake.

All workers of a case are loaded, then asked in rounds, a few inferences each per round, so that a machine that slows
down slows all of them alike. A worker whose turn it is not is stopped (SIGSTOP), for OpenMP and thread-pool threads
spin while they wait for work and would take the cores from the one being measured.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from benchmarks import peers
from benchmarks.case import CACHE, Case
from benchmarks.contenders import CONTENDERS

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Protocol:
    """How long to measure. seconds: cap on the timed part per contender; at least `min_iterations` run anyway."""

    warmup: int = 20
    iterations: int = 100
    rounds: int = 10
    settle: int = 2  # untimed calls at the start of a turn: the others have emptied the caches
    settle_seconds: float = 1.0  # no more of them than fit this: to a call that takes long, the caches are nothing
    seconds: float = 20.0
    min_iterations: int = 10
    load_timeout_s: float = 1800.0
    cold: bool = True  # compilers start with empty caches, so that the first-call time is what a new user sees


class WorkerFailed(Exception):
    """A contender could not load or run a case; the message says what it said."""


@dataclass
class Remote:
    """A worker process; `ask` wakes it, and puts it to sleep when it has answered."""

    name: str
    process: subprocess.Popen[str]
    log: IO[str]
    scratch: Path

    @classmethod
    def start(cls, name: str, case: Case, protocol: Protocol) -> Remote:
        python = peers.python_of(CONTENDERS[name].environment)
        if not python.exists():
            raise WorkerFailed(f"its environment is missing: python benchmarks/peers.py {CONTENDERS[name].environment}")
        scratch = CACHE / "scratch" / f"{os.getpid()}-{name}"
        scratch.mkdir(parents=True, exist_ok=True)
        log = open(scratch / "log", "w+")  # noqa: SIM115  (open as long as the process)
        process = subprocess.Popen(
            [str(python), str(FOLDER / "worker.py"), name, case.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=_environment(name, case, scratch, protocol),
            start_new_session=True,  # its own process group: compilers' helper processes stop and end with it
        )
        return cls(name, process, log, scratch)

    def ask(self, timeout_s: float, **command: Any) -> dict[str, Any]:
        """Send a command and return the answer; WorkerFailed on an error, a death or a timeout."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self._signal(signal.SIGCONT)
        try:
            print(json.dumps(command), file=self.process.stdin, flush=True)
            ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
            line = self.process.stdout.readline() if ready else ""
        except BrokenPipeError:
            line, ready = "", [self.process.stdout]
        if not line:
            raise WorkerFailed(self._last_words() if ready else f"no answer in {timeout_s:.0f} s")
        answer: dict[str, Any] = json.loads(line)
        self._sleep()
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer

    def end(self) -> None:
        """End the worker and its helpers; may be called twice."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self.log.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _sleep(self) -> None:
        self._signal(signal.SIGSTOP)
        for _ in range(1000):
            if Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return
            time.sleep(0.001)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _last_words(self) -> str:
        code = self.process.wait(timeout=30)
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read().splitlines() if line.strip()]
        return f"ended with code {code}: {' | '.join(lines[-2:])[:300]}"


def _environment(name: str, case: Case, scratch: Path, protocol: Protocol) -> dict[str, str]:
    """Return the environment of a worker: same thread count for all, caches in a folder of the contender's own."""
    threads = str(case.threads)
    values = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    caches = CACHE / "kept" / name
    if protocol.cold:
        caches = scratch / f"cache-{case.workload}-{case.dtype}-{case.batch}-{case.threads}-{time.time_ns()}"
    values["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
    values["ZENDNN_CFFI_CACHE"] = str(caches / "zendnn_cffi")
    return values


@dataclass
class Outcome:
    """What was measured of one contender on one case; `error` set and the rest empty where it failed."""

    contender: str
    times_ns: list[int] = field(default_factory=list)
    ready_s: float = float("nan")
    peak_bytes: int = 0
    resident_bytes: int = 0
    max_error: float = float("nan")  # largest |output - float64 reference| relative to the reference's largest |value|
    sqnr_db: float = float("nan")  # power of all reference outputs over that of the differences
    notes: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def run_case(case: Case, names: list[str], protocol: Protocol, say: Callable[[str], None]) -> list[Outcome]:
    """Measure the named contenders on `case`, interleaved, and return one Outcome each, in the order given."""
    outcomes = {name: Outcome(name) for name in names}
    remotes: dict[str, Remote] = {}
    planned: dict[str, Turn] = {}

    def attempt(name: str, step: Callable[[str], None]) -> None:
        try:
            step(name)
        except WorkerFailed as failure:
            outcomes[name].error = str(failure)
            say(f"{case}: {name}: failed: {failure}")
            if name in remotes:
                remotes.pop(name).end()

    def load(name: str) -> None:
        say(f"{case}: {name}: loading")
        if CONTENDERS[name].way(case) is None:
            raise WorkerFailed(f"no {case.dtype}")
        remotes[name] = Remote.start(name, case, protocol)
        outcomes[name].ready_s = remotes[name].ask(protocol.load_timeout_s, do="load")["ready_s"]
        file = remotes[name].scratch / "outputs.npz"
        remotes[name].ask(protocol.load_timeout_s, do="check", file=str(file))
        outcomes[name].max_error, outcomes[name].sqnr_db = _errors(file, case.reference_file)
        planned[name] = _warm_up(remotes[name], protocol)

    def turn(name: str) -> None:
        if planned[name].settle:
            remotes[name].ask(600, do="run", times=planned[name].settle)
        answer = remotes[name].ask(1800, do="run", times=planned[name].timed)
        outcomes[name].times_ns += answer["times_ns"]

    def finish(name: str) -> None:
        for key, value in remotes[name].ask(600, do="status").items():
            setattr(outcomes[name], key, value)

    try:
        for name in names:
            attempt(name, load)
        say(f"{case}: measuring {', '.join(remotes)}")
        for round_number in range(protocol.rounds):
            order = list(remotes)
            first = round_number % max(len(order), 1)
            for name in order[first:] + order[:first]:
                attempt(name, turn)
        for name in list(remotes):
            attempt(name, finish)
    finally:
        for remote in remotes.values():
            remote.end()
    return [outcomes[name] for name in names]


@dataclass(frozen=True)
class Turn:
    """Calls that make a turn: untimed ones, then timed ones."""

    settle: int
    timed: int

    @classmethod
    def of(cls, each_s: float, protocol: Protocol) -> Turn:
        """For calls of each_s seconds: all turns together stay under the cap, or are the fewest calls allowed."""
        total = min(protocol.iterations, max(protocol.min_iterations, int(protocol.seconds / each_s)))
        timed = max(1, -(-total // protocol.rounds))
        return cls(min(protocol.settle, timed, int(protocol.settle_seconds / each_s)), timed)


def _warm_up(remote: Remote, protocol: Protocol) -> Turn:
    """Warm up and return what makes a turn."""
    first = remote.ask(600, do="run", times=1)["times_ns"][0] / 1e9
    rest = min(protocol.warmup - 1, int(protocol.seconds / 4 / first))
    times = remote.ask(1800, do="run", times=rest)["times_ns"] if rest > 0 else [int(first * 1e9)]
    return Turn.of(float(np.median(times)) / 1e9, protocol)


def _errors(file: Path, reference_file: Path) -> tuple[float, float]:
    """Return the fields max_error and sqnr_db of an outcome."""
    with np.load(file) as ours, np.load(reference_file) as reference:
        pairs = list(zip(ours.values(), reference.values(), strict=True))
        if any(got.shape != want.shape for got, want in pairs):
            raise WorkerFailed(f"output shapes {[g.shape for g, _ in pairs]}, expected {[w.shape for _, w in pairs]}")
        largest = float(np.max([np.abs(got - want).max() / np.abs(want).max() for got, want in pairs]))  # NaN stays
        noise = sum(float(np.square(got - want).sum()) for got, want in pairs)
        signal = sum(float(np.square(want).sum()) for _, want in pairs)
        return largest, 10 * math.log10(signal / noise) if noise and signal else math.inf


def prepare(case: Case) -> None:
    """Write the files that the contenders of `case` share (see prepare.py)."""
    if all(file.exists() for file in case.shared_files):
        return
    python = peers.ensure("onnx")
    command = [str(python), str(FOLDER / "prepare.py"), case.to_json()]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise SystemExit(f"{case}: preparing the shared files failed, see above")
