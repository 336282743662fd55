"""The arena plan, checked by code that shares nothing with the planner."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fx_passes.plan.arena import Lifetime, plan_arena

LIFETIMES = st.lists(
    st.tuples(st.integers(0, 500), st.integers(0, 12), st.integers(0, 6)).map(
        lambda t: Lifetime(t[0], t[1], t[1] + t[2])
    ),
    max_size=14,
)


def check(lifetimes: list[Lifetime]) -> int:
    """Write every buffer's number at each step it lives, byte by byte; return the arena's size."""
    offsets, end = plan_arena(lifetimes)
    assert len(offsets) == len(lifetimes)
    for step in range(max((x.last for x in lifetimes), default=0) + 1):
        owner = np.full(end, -1)
        for number, (lifetime, offset) in enumerate(zip(lifetimes, offsets, strict=True)):
            if lifetime.first <= step <= lifetime.last:
                mine = owner[offset : offset + lifetime.size_bytes]
                assert offset >= 0 and offset % 64 == 0 and len(mine) == lifetime.size_bytes, "outside, or misaligned"
                assert (mine == -1).all(), f"buffer {number} shares bytes at step {step}"
                mine[:] = number
    return end


@settings(max_examples=200, deadline=None)
@given(LIFETIMES)
def test_no_two_live_buffers_share_a_byte(lifetimes: list[Lifetime]) -> None:
    end = check(lifetimes)
    rounded = [-(-x.size_bytes // 64) * 64 for x in lifetimes]
    assert end <= sum(rounded)
    steps = range(max((x.last for x in lifetimes), default=0) + 1)
    peak = max(sum(n for n, x in zip(rounded, lifetimes, strict=True) if x.first <= s <= x.last) for s in steps)
    assert end >= peak


def test_a_chain_needs_two_buffers() -> None:
    assert check([Lifetime(640, i, i + 1) for i in range(50)]) == 1280


def test_nothing() -> None:
    assert plan_arena([]) == ([], 0)
    assert plan_arena([Lifetime(0, 0, 3)])[1] == 0


def test_buffers_that_meet_at_one_step_are_apart() -> None:
    """A call reads one and writes the other."""
    (a, b), end = plan_arena([Lifetime(64, 0, 1), Lifetime(64, 1, 2)])
    assert a != b and end == 128
