"""Several processes of one contender that start at once: how long until each has answered, and whose memory it is.

The processes import, read weights and inputs, and say that they are ready. Then all begin in the same moment. Memory is
looked at while all of them are alive: Pss counts a page that n processes share as a part of n in each.

cold_start.py --together N prints the table.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.case import Case

_MARK = "@"  # lines of ours among what contenders print
_CALLS_BEFORE_MEMORY = 3


@dataclass(frozen=True)
class Group:
    """What processes measured that began at once.

    answers_s  of each, from the common beginning to its first answer, sorted
    cpu_s      CPU time of each until then
    pss_bytes  of each, after some calls, while all are there
    """

    answers_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    pss_bytes: tuple[int, ...]


@dataclass
class Rows:
    """Groups of one contender: `first` has empty caches, `after` is one process with those that a cold group left."""

    first: list[Group] = field(default_factory=list)
    alone: list[Group] = field(default_factory=list)
    cold: list[Group] = field(default_factory=list)
    after: list[Group] = field(default_factory=list)
    warm: list[Group] = field(default_factory=list)


def serve(name: str, case: Case) -> None:
    """Be one of the processes: each step waits for a line on stdin, and answers with one."""
    from benchmarks.contenders import CONTENDERS

    start = CONTENDERS[name].start_of(case)
    _answer("ready")
    began, cpu = time.perf_counter(), time.process_time()
    runner = start()
    runner.run()
    _answer({"answer": time.perf_counter() - began, "cpu": time.process_time() - cpu})
    for _ in range(_CALLS_BEFORE_MEMORY):
        runner.run()
    _answer({"pss": pss_bytes()})


def _answer(value: Any) -> None:
    print(_MARK + json.dumps(value), flush=True)
    sys.stdin.readline()


def pss_bytes(pid: int | str = "self") -> int:
    """Memory of a process, of shared pages its part."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "Pss":
            return int(rest.split()[0]) * 1024
    raise RuntimeError("the kernel does not say what is shared")


def run(command: Sequence[str], environment: Mapping[str, str], count: int) -> Group:
    """Let so many processes run serve() at once. Raises RuntimeError with the last words of one that fails."""
    with contextlib.ExitStack() as stack:
        members = [stack.enter_context(_Member(command, environment)) for _ in range(count)]
        for member in members:
            member.read()
        for member in members:
            member.go_on()
        answered = [member.read() for member in members]
        for member in members:
            member.go_on()
        held = [member.read() for member in members]
        for member in members:
            member.go_on()
    return Group(
        tuple(sorted(found["answer"] for found in answered)),
        tuple(found["cpu"] for found in answered),
        tuple(found["pss"] for found in held),
    )


class _Member:
    """One process of a group."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (a pipe that nobody reads would fill)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )

    def __enter__(self) -> _Member:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        self._process.communicate()
        self._errors.close()

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def read(self) -> Any:
        """The next line of ours."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line[len(_MARK) :])
        self._process.wait()
        self._errors.seek(0)
        raise RuntimeError((self._errors.read().strip().splitlines() or ["no message"])[-1])


def table(found: Mapping[str, Rows], count: int) -> str:
    """Medians as a Markdown table: seconds until the last process of a group has answered, and memory in MB."""
    lines = [
        f"| contender | one, cold s | warm s | {count} at once, cold s | CPU s each | one after those s |"
        f" {count} at once, warm s | CPU s each | Pss of one MB | sum of {count} MB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, rows in found.items():
        if not rows.alone:
            continue
        cells = [
            _seconds(_last(rows.first)), _seconds(_last(rows.alone)),
            _seconds(_last(rows.cold)), _seconds(_cpu(rows.cold)),
            _seconds(_last(rows.after)), _seconds(_last(rows.warm)), _seconds(_cpu(rows.warm)),
            _megabytes(rows.alone), _megabytes(rows.warm),
        ]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _last(groups: Sequence[Group]) -> list[float]:
    return [group.answers_s[-1] for group in groups]


def _cpu(groups: Sequence[Group]) -> list[float]:
    return [statistics.mean(group.cpu_s) for group in groups]


def _seconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else "-"


def _megabytes(groups: Sequence[Group]) -> str:
    return f"{statistics.median(sum(group.pss_bytes) for group in groups) / 1e6:.0f}" if groups else "-"
