"""Averages are those of Python's statistics."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fx_passes.search.averages import geometric_mean, median

TIMES = st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=9)


@given(TIMES)
def test_median(times: list[float]) -> None:
    assert median(iter(times)) == statistics.median(times)


@given(TIMES)
def test_geometric_mean(times: list[float]) -> None:
    assert geometric_mean(iter(times)) == pytest.approx(statistics.geometric_mean(times), rel=1e-12)
