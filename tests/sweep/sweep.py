"""Every model of torchvision, timm (up to 60M parameters) and Hugging Face (tiny) beside eager: `make sweep`.

Each in a process of its own with a time limit; one per family first. What is done is kept and not done again: --fresh
does it again, --again those with faults. With --rounds calls are timed beside eager's, in turns.
Exit status 1 if an answer was wrong, a process died or hung, ours raised where eager does not, or was slower.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # the checkout comes last, so that an installed zendnn_cffi wins over the source tree
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parents[2])]
    os.environ.setdefault("ZENDNN_CFFI_CACHE", "")

import torch._dynamo
import torch.export  # noqa: F401  what every model needs: forked processes then have it

import zendnn_cffi.backend  # noqa: F401
from tests.conformance.table import sources
from tests.sweep.check import ENTRIES, FAULTS, NOT_RUN, RIGHT, Verdict, check
from tests.sweep.hugging_face_models import HUGGING_FACE
from tests.sweep.page import write_page
from tests.sweep.process import Journal, run_apart
from tests.sweep.vision_models import TIMM, TORCHVISION

SOURCES = {"torchvision": TORCHVISION, "timm": TIMM, "hugging_face": HUGGING_FACE}
OUT = Path(__file__).parent / "out"
LIMIT_S = 300.0


def path_of(source: str, entry: str, out: Path = OUT) -> Path:
    """The journal of a source."""
    return out / f"{source}-{entry}.jsonl"


class Sweep:
    """The models of one source by one entry; one at a time."""

    def __init__(self, source: str, entry: str, options: argparse.Namespace) -> None:
        self.source, self.entry, self.options = source, entry, options
        self.journal = Journal(path_of(source, entry, options.out))
        self.journal.path.parent.mkdir(parents=True, exist_ok=True)
        self.sources, self.began = sources(), time.monotonic()

    def verdict(self, name: str, progress: str) -> Verdict:
        """The verdict on a model, found now where it is not known."""
        known = self.journal.verdicts.get(name)
        asked_again = self.options.fresh or (self.options.again and known is not None and known.verdict in FAULTS)
        without_times = known is not None and bool(self.options.rounds) and known.verdict == RIGHT and not known.ratios
        if known and not asked_again and not without_times:
            return known
        work = partial(check, SOURCES[self.source], name, self.entry, self.options.tune, self.options.rounds)
        found = run_apart(work, self.options.limit, self.journal.path.with_suffix(".log"))
        self.journal.add(name, found, self.sources)
        seconds = time.monotonic() - self.began
        print(f"[{progress}] {seconds:6.0f} s  {self.source} {self.entry} {name}: {found}", flush=True)
        return found

    def run(self) -> Counter[str]:
        """Check all models, or one of every family; return how often each verdict was found."""
        source, asked = SOURCES[self.source], self.options.models
        if not self.options.families:
            names = [name for name in source.in_turns() if not asked or name in asked]
            return Counter(self.verdict(name, f"{i}/{len(names)}").verdict for i, name in enumerate(names, 1))
        families, found = [*source.names().values()], Counter[str]()
        for i, names in enumerate(families, 1):
            verdicts = (self.verdict(name, f"{i}/{len(families)}").verdict for name in names)
            found[next((verdict for verdict in verdicts if verdict != NOT_RUN), NOT_RUN)] += 1
        return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all")
    parser.add_argument("--source", choices=SOURCES, action="append", help="default: all")
    parser.add_argument("--entry", choices=ENTRIES, action="append", help="default: optimize")
    parser.add_argument("--families", action="store_true", help="of every family the first model that runs")
    parser.add_argument("--tune", default="off", help="as optimize() takes it (%(default)s)")
    parser.add_argument("--rounds", type=int, default=0, metavar="N", help="turns of ours and eager, for times (none)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds for a model (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="check again, whatever is there")
    parser.add_argument("--again", action="store_true", help="check those with faults again")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="of the results (%(default)s)")
    parser.add_argument("--page", action="store_true", help="write all that ran, now or before, into docs/")
    options = parser.parse_args(arguments)
    found: Counter[str] = Counter()
    slower = False
    for entry in options.entry or ["optimize"]:
        for source in options.source or [*SOURCES]:
            sweep = Sweep(source, entry, options)
            found += sweep.run()
            slower = slower or any(verdict.slower for verdict in sweep.journal.verdicts.values())
    if options.page:
        journals = {(s, e): Journal(path_of(s, e, options.out)) for s in SOURCES for e in ENTRIES}
        write_page({which: journal for which, journal in journals.items() if journal.verdicts})
    print("\n" + ", ".join(f"{count} {word}" for word, count in found.most_common()))
    return int(slower or any(found[word] for word in FAULTS))


if __name__ == "__main__":
    sys.exit(main())
