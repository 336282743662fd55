"""Which of several ways to compute the same is the fastest, tried on the spot."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any


def times_ns(ways: Mapping[str, Callable[[], Any]], *, rounds: int, enough_ns: float = math.inf) -> dict[str, float]:
    """Return each way's fastest run; they take turns.

    rounds     runs of each
    enough_ns  after so long no further round begins
    """
    best, begun = dict.fromkeys(ways, math.inf), time.perf_counter_ns()
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter_ns()
            way()
            best[name] = min(best[name], time.perf_counter_ns() - start)
        if time.perf_counter_ns() - begun > enough_ns:
            break
    return best


def fastest(ways: Mapping[str, Callable[[], Any]], *, rounds: int, enough_ns: float = math.inf) -> str:
    """Return the name of the way whose fastest run is the fastest. rounds, enough_ns  as of times_ns"""
    best = times_ns(ways, rounds=rounds, enough_ns=enough_ns)
    return min(best, key=best.__getitem__)
