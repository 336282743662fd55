"""How far a whole model's answers are from eager's, and how much of it the engine computes: what all sweeps ask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, complex128, equal, float64

import zendnn_cffi

# Largest error relative to the largest output. Winograd and another order of summation cost about 1e-6 a layer; the
# deepest of the models has 300.
TOLERANCE = 1e-4


def relative_error(ours: Tensor, eager: Tensor) -> float:
    """The largest error relative to eager's largest value; inf where one alone is infinite, or no number."""
    if equal(ours, eager) or not eager.numel():
        return 0.0
    wide = complex128 if eager.is_complex() else float64
    a, e = ours.to(wide), eager.to(wide)
    finite = e.isfinite()
    if not equal(finite, a.isfinite()) or not bool(((a == e) | (a.isnan() & e.isnan()))[~finite].all()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    return float((a - e)[finite].abs().max() / e[finite].abs().max().clamp_min(1e-30))


def offloaded(modules: Iterable[Any]) -> tuple[int, int, int]:
    """(operations that the engine runs, all operations, regions) of optimized modules; views and sizes are left out."""
    found = [*modules]
    computing = [node for module in found for node in zendnn_cffi.explain(module).nodes if node.computes]
    return sum(node.offloaded for node in computing), len(computing), sum(len(module.regions()) for module in found)
