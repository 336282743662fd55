"""The sweep over made-up operators, the second case of which goes wrong: what test_conformance.py runs.

The operator's name says how: wrong, raise, crash, hang; "warn" lowers into a warning, "right" is right.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parents[2])]

import torch
from torch import Tensor, nn

import zendnn_cffi
from tests.conformance import cases, group, sweep

FAULTS = ("right", "wrong", "raise", "warn", "crash", "hang")
_optimize: Any = zendnn_cffi.optimize


class Halved(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def cases_of(name: str, most: int | None = None) -> Iterator[tuple[str, cases.Maker]]:
    """Three cases of a ReLU."""
    for number in range(3):
        yield f"float32/alone/function/{number}", partial(_case, name if number == 1 else "right")


def _case(fault: str) -> cases.Case:
    model = nn.ReLU().eval()
    model.fault = fault
    return cases.Case(model, (torch.ones(3),), {}, torch.float32)


def optimize(model: Any, example: Any, **options: Any) -> Any:
    """optimize(), or what stands in model.fault."""
    if model.fault == "wrong":
        return Halved()
    if model.fault == "raise":
        raise ValueError("no such layout")
    if model.fault == "warn":
        warnings.warn("zendnn_cffi: zen_region_0 could not be lowered", stacklevel=2)
    if model.fault == "crash":
        os.abort()
    if model.fault == "hang":
        time.sleep(600)
    return _optimize(model, example, **options)


if __name__ == "__main__":
    group.PATIENCE_S = 5.0
    cases.cases, cases.groups = cases_of, lambda: [*FAULTS]  # type: ignore[assignment]
    zendnn_cffi.optimize = optimize  # type: ignore[assignment]
    sys.exit(sweep.main(["--entry", "optimize", *sys.argv[1:]]))
