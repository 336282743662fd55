"""Texts of many lengths: what is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import many_lengths


def test_making_a_contender_counts_in_the_first_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it compiles then, or in its first call."""
    now = [0.0]
    monkeypatch.setattr(many_lengths.time, "perf_counter", lambda: now[0])

    def run(**_: Any) -> None:
        now[0] += 0.002

    def made_slowly() -> Callable[..., Any]:
        now[0] += 1.0
        return run

    found = many_lengths.measure({"early": made_slowly, "late": lambda: run}, 20, 4)
    assert found == {"early": [502.0, *[2.0] * 9], "late": [2.0] * 10}
