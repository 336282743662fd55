"""PyTorch's operator and module databases through this package: `make conformance`.

Every sample, in float32, bf16 and float16, alone and amid a small network, through optimize() and torch.compile, is
compared with eager PyTorch. Each operator runs in a process of its own. What is done is kept and not done again
(--fresh: it is).
Exit status 1 if an answer was wrong, a process died or hung, or ours raised where eager does not.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

if __name__ == "__main__":  # the checkout comes last, so that an installed zendnn_cffi wins over the source tree
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parents[2])]
    os.environ["OMP_NUM_THREADS"] = "1"  # two processes at a time; and a fork needs a process without threads
    os.environ.setdefault("ZENDNN_CFFI_CACHE", "")

import torch

from tests.conformance import cases
from tests.conformance.check import ENTRIES, FAULTS, RIGHT, Verdict, check
from tests.conformance.group import Child, Journal
from tests.conformance.table import ROOT, page, sources

OUT = Path(__file__).parent / "out"
_OTHERS = 60  # operators in a sample that regions do not know
_WARM = ("nn.functional.relu", "add", "cat", "clamp", "softmax", "view_as", "nn.Conv2d")  # fill caches of PyTorch's


def warm_up() -> None:
    """Import and run here what every process needs: forked ones then have it, which halves what they take."""
    torch.set_num_threads(1)
    for group in _WARM:
        for _, make in cases.cases(group, 1):
            assert all(check(group, make, entry).verdict == RIGHT for entry in ENTRIES), group
        torch._dynamo.reset()  # what it compiled for these counts nowhere as a first compilation
    gc.collect()
    gc.freeze()  # or collections in the processes look at PyTorch again, and write to the pages that all of them share


def label() -> str:
    """The folder of this machine's results: one for each instruction set asked for."""
    return os.environ.get("ZENDNN_MAX_CPU_ISA", "native").lower()


def path_of(group: str, entry: str, out: Path) -> Path:
    """The journal of a group."""
    return out / label() / entry / f"{group}.jsonl"


Todo = tuple[str, str, int | None]  # entry, group, how many samples of it (None: all)


def sample(seed: str) -> list[Todo]:
    """One sample of each operator that regions know, through both entries; others drawn by seed, through optimize()."""
    known = cases.vocabulary()
    others = [group for group in cases.groups() if group not in known]
    drawn = random.Random(seed).sample(others, _OTHERS)
    todo: list[Todo] = [(entry, group, 1) for entry in ENTRIES for group in known]
    return todo + [("optimize", group, 1) for group in drawn]


def sweep(todo: list[Todo], out: Path, jobs: int) -> dict[tuple[str, str], dict[str, Verdict]]:
    """Run what is not done yet, printing faults as they are found; return all verdicts by entry and group."""
    waiting, total, began = list(todo), len(todo), time.monotonic()
    running: list[Child] = []
    done, now = 0, sources()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                entry, group, most = waiting.pop(0)
                path = path_of(group, entry, out)
                path.parent.mkdir(parents=True, exist_ok=True)
                if Journal(path).is_done(most):
                    done += 1
                else:
                    running.append(Child(group, entry, path, most, now))
            time.sleep(0.01)
            for child in [child for child in running if not child.is_running()]:
                running.remove(child)
                done += 1
                _report(child, done, total, time.monotonic() - began)
    finally:
        for child in running:
            child.stop()
    return {(entry, group): Journal(path_of(group, entry, out)).verdicts() for entry, group, _ in todo}


def write_page(out: Path) -> None:
    """Write docs/conformance.md (of a limited instruction set: docs/conformance-avx2.md) from all journals."""
    every = [(entry, group) for entry in ENTRIES for group in cases.groups()]
    journals = {(entry, group): Journal(path_of(group, entry, out)) for entry, group in every}
    name = "conformance.md" if label() == "native" else f"conformance-{label()}.md"
    found = {which: journal.verdicts() for which, journal in journals.items()}
    (ROOT / "docs" / name).write_text(page(found, journals.values(), label=label()))


def _report(child: Child, done: int, total: int, seconds: float) -> None:
    verdicts = child.journal.verdicts()
    counts = Counter(v.verdict for v in verdicts.values())
    said = ", ".join(f"{count} {word}" for word, count in counts.items())
    print(f"[{done:4}/{total}] {seconds:6.0f} s  {child.entry:8} {child.group}: {said or 'no samples'}", flush=True)
    for key, verdict in verdicts.items():
        if verdict.verdict in FAULTS:
            print(f"    {verdict.verdict.upper()} {key}: {verdict.detail}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="OPERATOR", help="default: all operators and modules")
    parser.add_argument("--entry", choices=ENTRIES, action="append", help="default: both")
    parser.add_argument("--most", type=int, metavar="N", help="samples of each operator and dtype (all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="run these groups again, whatever is there")
    parser.add_argument("--again", action="store_true", help="run the groups with faults again")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="of the results (%(default)s)")
    parser.add_argument(
        "--sample", action="store_true", help="a few cases of every operator that regions know, and others"
    )
    parser.add_argument("--page", action="store_true", help="write all that ran, now or before, into docs/")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process outlives this one
    every = cases.groups()  # read here, not in each of the processes
    groups, entries = options.groups or every, options.entry or [*ENTRIES]
    for journal in (Journal(path_of(g, e, options.out)) for e in entries for g in groups):
        faulty = any(v.verdict in FAULTS for v in journal.verdicts().values())
        if options.fresh or (options.again and faulty):
            journal.path.unlink(missing_ok=True)
    warm_up()
    if options.sample:
        todo = sample(sources())
    else:
        todo = [(entry, group, options.most) for entry in entries for group in groups]
    found = sweep(todo, options.out, options.jobs)
    counts = Counter(v.verdict for verdicts in found.values() for v in verdicts.values())
    print("\n" + ", ".join(f"{count} {word}" for word, count in counts.most_common()))
    if options.page:
        write_page(options.out)
    return int(any(counts[word] for word in FAULTS))


if __name__ == "__main__":
    sys.exit(main())
