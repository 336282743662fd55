"""Place buffers with known lifetimes in one arena so that no two that live together share a byte."""

from __future__ import annotations

from collections.abc import Sequence

from zendnn_cffi.runtime.huge_pages import ALIGNMENT_BYTES
from zendnn_cffi.values import dataclass


@dataclass(frozen=True)
class Lifetime:
    """A buffer's size and the steps, both included, between which its bytes are spoken for."""

    size_bytes: int
    first: int
    last: int


def plan_arena(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Return an offset per buffer and the arena's size, in bytes.

    Largest first, each at the lowest gap among those already placed that live at the same time (first fit by size: the
    greedy-by-size rule of Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020).
    """
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    end = 0
    for i in sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].size_bytes, lifetimes[i].first)):
        lifetime = lifetimes[i]
        size = _aligned(lifetime.size_bytes)
        beside = sorted(
            (offsets[j], offsets[j] + _aligned(lifetimes[j].size_bytes))
            for j in placed
            if lifetimes[j].first <= lifetime.last and lifetime.first <= lifetimes[j].last
        )
        position = 0
        for start, stop in beside:
            if start - position >= size:
                break
            position = max(position, stop)
        offsets[i] = position
        placed.append(i)
        end = max(end, position + size)
    return offsets, end


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
