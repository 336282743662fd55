"""Run one torchvision model eager and optimized, and say how far apart the answers are and how much ZenDNN computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import zendnn_cffi
from demo import vision
from zendnn_cffi.explain import Explanation

# Largest error relative to the largest output. Winograd and another order of summation cost about 1e-6 a layer; the
# deepest of these models has 300.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Verdict:
    """What came out. offloaded, nodes: operations that ZenDNN ran, of all that compute something."""

    name: str
    error: float
    offloaded: int
    nodes: int
    ready_s: float
    eager_ms: float
    optimized_ms: float
    failure: str = ""

    @property
    def share(self) -> float:
        return self.offloaded / max(self.nodes, 1)

    @property
    def passed(self) -> bool:
        return not self.failure and self.error <= TOLERANCE

    def __str__(self) -> str:
        if self.failure:
            return f"{self.name:20} FAILED  {self.failure}"
        return (
            f"{self.name:20} {'ok' if self.passed else 'WRONG':6} error {self.error:.1e}  "
            f"ZenDNN ran {self.offloaded:3} of {self.nodes:3} ({self.share:4.0%})  first call {self.ready_s:5.1f} s  "
            f"ms: eager {self.eager_ms:7.1f}, optimized {self.optimized_ms:7.1f}"
        )


def check(name: str, batch: int = 1, seed: int = 0, *, tune: str = "auto", repeats: int = 1) -> Verdict:
    """Return the verdict on the torchvision model `name` in float32; times are the best of `repeats` calls."""
    model = vision.build(name, seed)
    images = vision.image_batch(batch, vision.image_side(name), seed)
    with torch.inference_mode():
        expected = model(images)
        began = time.perf_counter()
        optimized = zendnn_cffi.optimize(model, (images,), tune=tune)
        answer = optimized(images)
        ready_s = time.perf_counter() - began
        assert bool(expected.isfinite().all()), "the model itself overflowed"
        error = ((answer - expected).abs().max() / expected.abs().max()).item()
        eager_ms = min(_milliseconds(model, images) for _ in range(repeats))
        optimized_ms = min(_milliseconds(optimized, images) for _ in range(repeats))
    offloaded, nodes = count_offloaded(zendnn_cffi.explain(optimized))
    return Verdict(name, error, offloaded, nodes, ready_s, eager_ms, optimized_ms)


def count_offloaded(explanation: Explanation) -> tuple[int, int]:
    """Return (operations that ZenDNN runs, all operations); views compute nothing and are left out."""
    computing = [node for node in explanation.nodes if node.became != "view"]
    return sum(node.offloaded for node in computing), len(computing)


def failed(name: str, failure: str) -> Verdict:
    """Return the verdict on a model that raised or ended the process."""
    nan = float("nan")
    return Verdict(name, nan, 0, 0, nan, nan, nan, failure)


def _milliseconds(run: Callable[[torch.Tensor], object], images: torch.Tensor) -> float:
    began = time.perf_counter()
    run(images)
    return (time.perf_counter() - began) * 1e3
