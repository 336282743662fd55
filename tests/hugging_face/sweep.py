"""Time Hugging Face models beside eager: `make hugging-face`, or `python tests/hugging_face/sweep.py [MODEL ...]`.

Of every kind one of medium size (384 wide, 4 layers, 128 tokens, random weights), through torch.compile and through
optimize(). Prints a line for each: whether the answers are eager's, and medians of calls in turns. Exit status 1 if an
answer was wrong, or a model slower than eager beyond noise. With --rounds 0 answers alone are compared. With
--dtype bf16 models are cast; errors are then those against float64, and eager's own may be exceeded by half.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the checkout comes last, so that an installed zendnn_cffi wins over the source tree
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parents[2])]

import torch
from torch import nn

import zendnn_cffi
from tests.support.answers import TOLERANCE, relative_error
from tests.support.hugging_face import MEDIUM, models, tensors_of
from tests.zoo.check import in_turns, is_slower, ratio_quartiles
from zendnn_cffi import backend

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_BEYOND_EAGER = 1.5  # times eager's error in bf16: of random weights and few outputs, both are chance


def error_of(actual: Any, expected: Any) -> float:
    """The largest error of any output, relative to that output's largest value."""
    return max(relative_error(a, b) for a, b in zip(tensors_of(actual), tensors_of(expected), strict=True))


def cast(tensors: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Arguments with floating-point tensors in dtype."""
    floats = {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}
    return {**tensors, **{name: t.to(dtype) for name, t in floats.items()}}


def check(name: str, rounds: int, dtype: torch.dtype) -> bool:
    """Print the verdicts on one model; return whether it is right and no slower than eager in both ways."""
    row = models(MEDIUM)[name]
    model, inputs = row.build(), row.inputs()
    tolerance, wide = TOLERANCE, None
    if dtype != torch.float32:
        wide = copy.deepcopy(model).double()
        model, inputs = model.to(dtype), cast(inputs, dtype)
    torch._dynamo.reset()
    ways: dict[str, nn.Module | Callable[..., Any]] = {
        "torch.compile": torch.compile(model, backend="zendnn"),
        "optimize": zendnn_cffi.optimize(model, inputs),
    }
    good = True
    with torch.no_grad():
        expected = model(**inputs)
        if wide is not None:
            exact = wide(**cast(inputs, torch.float64))
            tolerance, expected = _BEYOND_EAGER * error_of(expected, exact), exact
        errors = {way: error_of(run(**inputs), expected) for way, run in ways.items()}
        runs = {"eager": model, **ways}
        medians = in_turns({way: lambda run=run: run(**inputs) for way, run in runs.items()}, rounds)  # type: ignore[misc]
    for way in ways:
        right = errors[way] <= tolerance
        times, slower = _times(medians[way], medians["eager"]) if rounds else ("", False)
        print(f"{name:12} {way:14} {'ok' if right else 'WRONG':6} error {errors[way]:.1e}{times}", flush=True)
        good = good and right and not slower
    return good


def _times(ours: list[float], eager: list[float]) -> tuple[str, bool]:
    """What to print of times, and whether ours are longer beyond noise."""
    ratios = ratio_quartiles(ours, eager)
    slower = is_slower(ratios)
    said = f"  ms: eager {statistics.median(eager):7.2f}, ours {statistics.median(ours):7.2f} ({1 / ratios[1]:.2f}x)"
    return said + (" SLOWER" if slower else ""), slower


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="turns of each (%(default)s; 0: no times)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of models and inputs (%(default)s)")
    options = parser.parse_args(arguments)
    backend.register()
    warnings.filterwarnings("ignore", category=FutureWarning)
    names = options.models or [*models(MEDIUM)]
    good = [check(name, options.rounds, DTYPES[options.dtype]) for name in names]
    asked = "right and no slower than eager" if options.rounds else "right"
    print(f"\n{sum(good)} of {len(good)} {asked}, both ways")
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
