"""The sweep's program over models that fail in every way: a test runs it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parents[2])]

import torch
from torch import Tensor, nn

import zendnn_cffi
from tests.sweep import sweep
from tests.sweep.case import Case, NotRun, Source

KINDS = ("right", "wrong", "raises", "crashes", "hangs", "draws", "refused")
FAMILIES = {"small": ["huge", *KINDS[:3]], "odd": [*KINDS[3:]]}
_optimize = zendnn_cffi.optimize


class Noise(nn.Module):
    """Another answer each time, whatever the seed."""

    def forward(self, x: Tensor) -> Tensor:
        return x + time.perf_counter_ns() % 1000


def build(name: str) -> Case:
    """A convolution that this package then treats as its name says."""
    if name in ("huge", "refused"):
        raise NotRun("not asked for")
    zendnn_cffi.optimize = _treated(name)  # in the process of this model alone
    torch.manual_seed(0)
    return Case(Noise() if name == "draws" else nn.Conv2d(3, 8, 3).eval(), (torch.randn(1, 3, 9, 9),))


def _treated(name: str) -> Any:
    def optimize(model: nn.Module, inputs: Any, **options: Any) -> Any:
        if name == "raises":
            raise ValueError("no such layout")
        if name == "crashes":
            os.abort()
        if name == "hangs":
            time.sleep(60)
        if name == "wrong":
            model = nn.Sequential(model, nn.Softplus(50.0))
            return _optimize(model.eval(), inputs, **options)
        return _optimize(model, inputs, **options)

    return optimize


if __name__ == "__main__":
    sweep.SOURCES = {"faulty": Source(lambda: FAMILIES, build)}
    sys.exit(sweep.main(sys.argv[1:]))
