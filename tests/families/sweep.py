"""Every family of models beside eager, by optimize() and torch.compile: `make models`.

First whether answers are right (kernels chosen by estimate), then times on a machine that should be quiet meanwhile:
eager, both entries and Inductor, in turns. Each model runs in a process of its own. What is done is kept in --out and
not done again (--fresh: it is); docs/models.md is made of it. diffusers' models are left out where it is not installed.
Exit status 1 if an answer was wrong, a process died or hung, or ours raised where eager does not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # the checkout comes last, so that an installed zendnn_cffi wins over the source tree
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parents[2])]

from tests.conformance.table import sources
from tests.families.check import ENTRIES, Outcome, Verdict, check
from tests.families.page import write_page
from tests.families.rows import Row, table

OUT = Path(__file__).parent / "out"
ANSWERS, TIMES = "answers", "times"
PATIENCE_S = 900.0  # what a model may take; on a busy machine and with Inductor, minutes


def path_of(part: str, name: str, out: Path) -> Path:
    """Where the verdict on a row lies."""
    return out / part / f"{name}.json"


def read(part: str, name: str, out: Path) -> Verdict | None:
    """The verdict, None where there is none."""
    path = path_of(part, name, out)
    return Verdict.from_dict(json.loads(path.read_text())) if path.exists() else None


def _write(verdict: Verdict, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(verdict.to_dict(), indent=1))
    part.replace(path)


def _run(name: str, part: str, out: Path, inductor: bool) -> None:
    """In a process of its own: check a row and write what came out."""
    path = path_of(part, name, out)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".log").open("w") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        verdict = check(table()[name], timed=part == TIMES, inductor=inductor)
    verdict.sources = sources()
    _write(verdict, path)


def in_process(name: str, part: str, out: Path, inductor: bool) -> Verdict:
    """The verdict on a row, also where its process dies or hangs."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(name, part, out, inductor))
    process.start()
    process.join(PATIENCE_S)
    if process.is_alive():
        process.kill()
        process.join()
        fault = f"hung for {PATIENCE_S:.0f} s"
    elif process.exitcode:
        fault = f"the process ended with status {process.exitcode}: see {path_of(part, name, out).with_suffix('.log')}"
    else:
        found = read(part, name, out)
        assert found is not None
        return found
    verdict = Verdict(name, {entry: Outcome(fault) for entry in ENTRIES}, sources=sources())
    _write(verdict, path_of(part, name, out))
    return verdict


def sweep(rows: Sequence[Row], part: str, out: Path, *, inductor: bool = True, seconds: float = 1e9) -> list[Verdict]:
    """Check what is not checked yet, printing each; begin none after so many seconds."""
    began, found = time.monotonic(), []
    for number, row in enumerate(rows, 1):
        verdict = read(part, row.name, out)
        if verdict is None:
            if time.monotonic() - began > seconds:
                continue
            verdict = in_process(row.name, part, out, inductor)
            print(f"[{number:2}/{len(rows)}] {time.monotonic() - began:5.0f} s  {line(verdict)}", flush=True)
        found.append(verdict)
    return found


def line(verdict: Verdict) -> str:
    """What the console says of a verdict."""
    from tests.families.page import quotients

    said = []
    for entry, outcome in verdict.entries.items():
        ratios = quotients(verdict, entry)
        faster = (
            f", {ratios[1]:.2f} of eager{' SLOWER' if ratios[0] > 1.0 and ratios[1] > 1.03 else ''}" if ratios else ""
        )
        share = "" if outcome.share is None else f", {outcome.share:.0%} of time"
        state = outcome.fault.upper() if outcome.fault else f"right to {outcome.error:.0e}"
        counts = f"{outcome.offloaded}/{outcome.nodes} in {outcome.regions}"
        first = f"first call {outcome.first_call_s:.1f} s ({outcome.first_call_cpu_s:.1f} of CPU)"
        said.append(f"{entry} {state}, {counts}{share}{faster}, {first}")
    return f"{verdict.name:20} " + " | ".join(said) + (f" | Inductor {verdict.inductor}" if verdict.inductor else "")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all")
    parser.add_argument("--part", choices=(ANSWERS, TIMES), action="append", help="default: both, one after the other")
    parser.add_argument("--seconds", type=float, default=1e9, metavar="N", help="begin no model later than this")
    parser.add_argument("--no-inductor", action="store_true", help="leave Inductor out, which compiles for minutes")
    parser.add_argument("--fresh", action="store_true", help="check these models again, whatever is there")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="of the results (%(default)s)")
    parser.add_argument("--page", action="store_true", help="write docs/models.md of all that ran, now or before")
    options = parser.parse_args(arguments)
    every = table()
    rows = [every[name] for name in options.models or every]
    os.environ.setdefault("ZENDNN_CFFI_CACHE", str(options.out.resolve() / "cache"))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(options.out.resolve() / "inductor"))
    if options.fresh:
        for part in options.part or (ANSWERS, TIMES):
            for row in rows:
                path_of(part, row.name, options.out).unlink(missing_ok=True)
    found = []
    for part in options.part or (ANSWERS, TIMES):
        found += sweep(rows, part, options.out, inductor=not options.no_inductor, seconds=options.seconds)
    right = sum(verdict.is_right for verdict in found)
    print(f"\n{right} of {len(found)} right by both entries")
    if options.page:
        write_page({part: {name: read(part, name, options.out) for name in every} for part in (ANSWERS, TIMES)})
    return int(right < len(found))


if __name__ == "__main__":
    sys.exit(main())
