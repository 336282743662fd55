"""Windows of time beside other work."""

from __future__ import annotations

import pytest

from benchmarks import beside_other_work


@pytest.mark.parametrize(("call", "times"), [(0.5, 5), (1.9, 1), (4.0, 1), (7.0, 1)])
def test_calls_count_once_it_has_settled(call: float, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that takes longer than all of it has its own time, not none."""
    now = [100.0]
    monkeypatch.setattr(beside_other_work.time, "perf_counter", lambda: now[0])

    def run() -> None:
        now[0] += call

    found = beside_other_work.window(run, 3.0)
    assert found == pytest.approx([1e3 * call] * len(found)) and len(found) >= 1
    assert len(found) == times
