"""Check every torchvision classification model: `make zoo`, or `python tests/zoo/sweep.py [--json FILE] [MODEL ...]`.

Prints a line per model: whether its answers are right, how much ZenDNN computed, and its time beside eager PyTorch's,
contiguous and channels_last, in turns. Each model runs in a process that a crash ends without ending the sweep.
Exit status 1 if any answer was wrong, or any model slower than eager channels_last beyond noise.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":  # the checkout comes last, so that an installed zendnn_cffi wins over the source tree
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parents[2])]

from demo import vision
from tests.zoo.check import Verdict, check, failed


def sweep(names: list[str], batch: int, tune: str, rounds: int) -> list[Verdict]:
    """Return the verdicts on the named models, printing each as it is found."""
    verdicts = []
    pool = _pool()
    for number, name in enumerate(names, 1):
        try:
            verdict = pool.submit(check, name, batch, tune=tune, rounds=rounds).result()
        except BrokenProcessPool:
            verdict = failed(name, "the process died")
            pool = _pool()
        except Exception as error:  # any error is this model's verdict, and the sweep goes on
            verdict = failed(name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        verdicts.append(verdict)
        print(f"[{number:2}/{len(names)}] {verdict}", flush=True)
    pool.shutdown()
    return verdicts


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all")
    parser.add_argument("--batch", type=int, default=1, metavar="N")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="turns of each; 0: no times (%(default)s)")
    parser.add_argument("--tune", default="auto", help="as optimize() takes it (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the verdicts here")
    options = parser.parse_args(arguments)
    verdicts = sweep(options.models or vision.classification_models(), options.batch, options.tune, options.rounds)
    passed = [verdict for verdict in verdicts if verdict.passed]
    slower = [verdict.name for verdict in passed if verdict.slower]
    print(f"\n{len(passed)} of {len(verdicts)} models right")
    if passed:
        worst = max(passed, key=lambda verdict: verdict.error)
        print(f"largest error {worst.error:.1e} ({worst.name})")
        print(f"slower than eager channels_last: {', '.join(slower) or 'none'}")
    if options.json:
        options.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
    return int(len(passed) < len(verdicts) or bool(slower))


if __name__ == "__main__":
    sys.exit(main())
