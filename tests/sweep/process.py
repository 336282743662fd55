"""A model in a process of its own, with a time limit; results in a file of JSON lines, a line as each is found."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from tests.sweep.check import CRASHED, HUNG, Verdict
from zendnn_cffi.engine.host import cpu_name

_MEMORY_BYTES = 8 << 30  # that a model may take: beyond, allocating fails, and no other process is killed
_BETWEEN_LOOKS_S = 0.5  # counted at most: in longer gaps this process was stopped, and its child with it


class Run(NamedTuple):
    """Where a verdict was found: on which CPU, and with which sources of the package."""

    cpu: str
    sources: str


class Journal:
    """Verdicts by name: {"name": ..., "sources": hash, "cpu": ..., "verdict": ...} a line; a later one replaces it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.verdicts: dict[str, Verdict] = {}
        self.runs: dict[str, Run] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # cut by the end of the process
                continue
            name = entry.pop("name")
            self.runs[name] = Run(sources=entry.pop("sources"), cpu=entry.pop("cpu", "unknown"))
            self.verdicts[name] = Verdict(**entry)

    def add(self, name: str, verdict: Verdict, sources: str) -> None:
        """Write a verdict at once."""
        self.verdicts[name], self.runs[name] = verdict, Run(cpu_name(), sources)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            entry = {"name": name, **self.runs[name]._asdict(), **asdict(verdict)}
            file.write(json.dumps(entry) + "\n")


def run_apart(work: Callable[[], Verdict], limit_s: float, log: Path) -> Verdict:
    """Return what work returns in a forked process; a crash, and more time than limit_s, are verdicts too.

    Its memory is limited as well: allocating beyond raises.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        _into(log)
        _limit_memory(_MEMORY_BYTES)
        sender.send(work())

    process = context.Process(target=child, daemon=True)
    process.start()
    sender.close()
    waited, looked, was_short, found = 0.0, time.monotonic(), 0.0, None
    try:
        while found is None and waited < limit_s:
            if receiver.poll(_BETWEEN_LOOKS_S):
                found = _received(receiver)
                break
            now, short = time.monotonic(), _waited_for_a_core(process.pid)
            waited += max(min(now - looked, 2 * _BETWEEN_LOOKS_S) - (short - was_short), 0.0)
            looked, was_short = now, short
        else:
            return Verdict(HUNG, f"for {limit_s:.0f} s")
        process.join(10)
        return found or Verdict(CRASHED, f"with status {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _waited_for_a_core(pid: int | None) -> float:
    """Seconds for which the process could have run, and others did: a busy machine is no hang."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # it ended, or the kernel does not count
        return 0.0


def _received(receiver: multiprocessing.connection.Connection) -> Verdict | None:
    try:
        verdict: Verdict = receiver.recv()
        return verdict
    except EOFError:
        return None


def _limit_memory(further_bytes: int) -> None:
    """Let this process take so much more address space, and no more."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + further_bytes, most))


def _into(log: Path) -> None:
    """Send what libraries print into a file."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
