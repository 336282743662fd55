"""A group of cases in a process of its own: what it runs is written down before, so a crash or a hang has a name."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.conformance import cases
from tests.conformance.check import CRASHED, HUNG, Verdict, check

PATIENCE_S = 120.0  # what a case may take: the longest takes a few seconds
_BETWEEN_LOOKS_S = 1.0  # counted at most: in longer gaps this process was stopped, and its children with it
_RESET_EVERY = 50  # cases after which TorchDynamo forgets what it compiled


class Journal:
    """A file of JSON lines: {"sources": hash}, {"begin": key}, {"key": key, "verdict": ...} ..., {"done": most}."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, entry: dict[str, Any]) -> None:
        """Append an entry at once: the process may end with the next instruction."""
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def entries(self) -> list[dict[str, Any]]:
        """What was written, a line that a crash cut left out."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [entry for line in lines if (entry := _parsed(line)) is not None]

    def verdicts(self) -> dict[str, Verdict]:
        """The verdicts by key."""
        found = [dict(entry) for entry in self.entries() if "key" in entry]
        return {entry.pop("key"): Verdict(**entry) for entry in found}

    @property
    def sources(self) -> str:
        """The sources that the latest process ran on, "" where none did."""
        return next((e["sources"] for e in reversed(self.entries()) if "sources" in e), "")

    def unfinished(self) -> str | None:
        """The case that began and has no verdict."""
        begun = next((e["begin"] for e in reversed(self.entries()) if "begin" in e), None)
        return None if begun in self.verdicts() else begun

    def is_done(self, most: int | None) -> bool:
        """Whether every case of the group has its verdict, of at most so many samples."""
        done = [entry["done"] for entry in self.entries() if "done" in entry]
        return None in done or (most is not None and any(most <= other for other in done))


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) else None


def run_group(group: str, entry: str, journal: Journal, most: int | None, sources: str) -> None:
    """Check every case of the group that has no verdict yet; sources: what to note of the package that runs them."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # what stays plain PyTorch is said at length
    known = journal.verdicts()
    journal.write({"sources": sources})
    for count, (key, make) in enumerate(cases.cases(group, most), 1):
        if key in known:
            continue
        journal.write({"begin": key})
        verdict = check(group, make, entry)
        journal.write({"key": key, **{k: v for k, v in vars(verdict).items() if v}})
        if count % _RESET_EVERY == 0:
            torch._dynamo.reset()
    journal.write({"done": most})


class Child:
    """A forked process that runs a group; after a crash or a hang another goes on behind the case that did it."""

    def __init__(self, group: str, entry: str, path: Path, most: int | None, sources: str) -> None:
        self.group, self.entry, self.journal, self.most, self.sources = group, entry, Journal(path), most, sources
        self._start()

    def _start(self) -> None:
        sys.stdout.flush()
        self.pid = os.fork()
        self.waited_s, self.looked = 0.0, time.monotonic()
        self.size = -1
        if self.pid == 0:
            status = 1
            try:
                _quiet(self.journal.path.with_suffix(".log"))
                run_group(self.group, self.entry, self.journal, self.most, self.sources)
                status = 0
            except BaseException:  # the journal's reader sees it as a crash; the log says more
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)

    def is_running(self) -> bool:
        """Look after the process; False once the group is done or cannot go on."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return not self._is_stuck() or self._blame(HUNG, f"for {PATIENCE_S:.0f} s")
        if os.waitstatus_to_exitcode(status) == 0:
            return False
        return self._blame(CRASHED, _how(os.waitstatus_to_exitcode(status)))

    def _is_stuck(self) -> bool:
        size = self.journal.path.stat().st_size if self.journal.path.exists() else 0
        now = time.monotonic()
        self.waited_s += min(now - self.looked, _BETWEEN_LOOKS_S)
        self.looked = now
        if size != self.size:
            self.size, self.waited_s = size, 0.0
        return self.waited_s > PATIENCE_S

    def _blame(self, verdict: str, how: str) -> bool:
        """Note what the unfinished case did, and go on behind it; False if there is none."""
        if verdict == HUNG:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        key = self.journal.unfinished()
        if key is None:
            self.journal.write({"key": "samples", "verdict": verdict, "detail": how})
            return False
        self.journal.write({"key": key, "verdict": verdict, "detail": how})
        self._start()
        return True

    def stop(self) -> None:
        """End the process; its verdicts stay."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _quiet(log: Path) -> None:
    """Send what libraries print into a file."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


def _how(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
