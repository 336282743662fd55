"""`make verify-library`: run every implementation in every kind of use, and write what is right into the package.

    python -m zendnn_cffi.primitives.verification.run [--only TEXT] [--sample SECONDS] [--again]

Each group of cases runs in a process of its own; what it is about to run is written down first. So a case that ends the
process is known, and the rest of the group goes on without it. What was done is kept in build/verify-library: run
again, and it goes on where it stopped. Each primitive runs with operands that end right before an unreadable page, on
all threads, and with operands that begin right behind one, on a single thread. Two cores take about half an hour.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from zendnn_cffi.engine import host
from zendnn_cffi.primitives.verification import records
from zendnn_cffi.primitives.verification.groups import groups

_FOLDER = Path("build/verify-library")
_HANGS_SECONDS = 300


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="verify-library", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="groups whose name contains this; results are not written")
    parser.add_argument("--sample", type=float, default=0.0, help="some cases of all groups, SECONDS long; not written")
    parser.add_argument("--again", action="store_true", help="forget what was done before")
    args = parser.parse_args(argv)
    if args.sample:
        return min(_report("sample", sample(args.sample)), 1)
    names = [name for name in groups() if args.only in name]
    start, found = time.perf_counter(), dict[str, str]()
    for number, name in enumerate(names):
        results = run_group(name, _FOLDER / records.machine(), again=args.again)
        took = time.perf_counter() - start
        _report(f"[{number + 1}/{len(names)}, {took:.0f} s] {name}", results)
        found |= {kind: problem or found.get(kind, "") for kind, problem in results.items()}
    if not args.only:
        print("written:", records.save(records.machine(), found, cpu=host.cpu_name()))
    return 0


def sample(seconds: float) -> dict[str, str]:
    """Return kind -> problem of cases picked from all groups, as many as fit."""
    with tempfile.TemporaryDirectory() as folder:
        return run_group("all", Path(folder), seconds=seconds)


def _report(title: str, results: dict[str, str]) -> int:
    """Print how many kinds are right, and each that is not known to be wrong; return how many of these there are."""
    known = records.verified(records.machine())
    wrong = {kind: problem for kind, problem in results.items() if problem}
    new = {kind: problem for kind, problem in wrong.items() if not known.get(kind)}
    print(f"{title}: {len(results)} kinds, {len(wrong)} wrong, {len(new)} of them new", flush=True)
    for kind, problem in new.items():
        print(f"    {kind}: {problem}", flush=True)
    return len(new)


def run_group(name: str, folder: Path, *, seconds: float = 0.0, again: bool = False) -> dict[str, str]:
    """Return kind -> problem ("" for right) of a group's cases, run in child processes.

    seconds  if given, a sample of the cases that takes about so long
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / (name.replace(" ", "-") + ".jsonl")
    if again:
        log.unlink(missing_ok=True)
    end = time.monotonic() + seconds
    while True:
        position, left = _position(log), end - time.monotonic() if seconds else 0.0
        if position is None or left < 0:  # the child whose time was up may have ended otherwise
            return _results(log)
        command = [
            sys.executable,
            "-m",
            "zendnn_cffi.primitives.verification.child",
            name,
            str(log),
            str(position),
            str(left),
        ]
        reason = _run(command, log)
        if reason:
            _blame(log, reason)


def _run(command: list[str], log: Path) -> str:
    """Run a child; return how it ended where that was not by itself: "ends the process (signal 11)", "hangs"."""
    process = subprocess.Popen(command)
    size, seen = -1, time.monotonic()
    while True:
        try:
            code = process.wait(0.2)
        except subprocess.TimeoutExpired:
            now = log.stat().st_size if log.exists() else 0
            if now != size:
                size, seen = now, time.monotonic()
            elif time.monotonic() - seen > _HANGS_SECONDS:
                process.kill()
                process.wait()
                return "hangs"
            continue
        except BaseException:
            process.kill()
            raise
        if code > 0:
            raise RuntimeError(f"{' '.join(command)} failed with exit code {code}")
        return f"ends the process (signal {-code})" if code else ""


def _lines(log: Path) -> list[dict[str, object]]:
    if not log.exists():
        return []
    text = log.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _position(log: Path) -> int | None:
    """Return how many checks of the group are done; None for all."""
    lines = _lines(log)
    if lines and lines[-1].get("complete"):
        return None
    return sum("problem" in line for line in lines)


def _blame(log: Path, reason: str) -> None:
    """Write that the check that was running is wrong."""
    lines = _lines(log)
    running = lines[-1] if lines and "start" in lines[-1] else {"start": "?", "case": "before the first case"}
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": running["start"], "case": running["case"], "problem": reason}) + "\n")


def _results(log: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in _lines(log):
        if line.get("kind") and "problem" in line:
            kind, problem = str(line["kind"]), str(line["problem"])
            if problem and not found.get(kind):
                problem = f"{problem}: {line['case']}"
            found[kind] = found.get(kind) or problem
    return found


if __name__ == "__main__":
    sys.exit(main())
