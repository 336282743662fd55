"""Measurements made up, so that a test decides which candidate is chosen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fx_passes.candidates.candidates import Candidate
from fx_passes.region import compile, variants
from fx_passes.search import measure, tuner
from fx_passes.search.database import Database, Result
from fx_passes.search.measure import Bench


def prefer(monkeypatch: pytest.MonkeyPatch, is_preferred: Callable[[Candidate], bool]) -> list[Candidate]:
    """Let the preferred ones always win; return the candidates measured. Numbers are compared as ever.

    In a cache's folder of the test's own (`fresh`), as nothing is measured where choices were kept.
    """
    measured: list[Candidate] = []
    check = Bench.check_and_time

    def check_and_time(bench: Bench, candidate: Candidate, best_ns: float = 0.0) -> Result:
        measured.append(candidate)
        result = check(bench, candidate, best_ns)
        return Result(1.0 if is_preferred(candidate) else 1e9, result.error, result.right)

    database = Database("made up", None)
    monkeypatch.setattr(tuner, "database_for", lambda threads, **_: database)
    monkeypatch.setattr(Bench, "check_and_time", check_and_time)
    monkeypatch.setattr(measure, "fastest_ns", lambda *_, **__: 1.0)
    monkeypatch.setattr(compile, "refine", lambda operations, choice, *_: list(choice))  # it would measure again
    monkeypatch.setattr(variants, "_CLEARLY_FASTER", 1e-9)  # or the whole region would go back to PyTorch
    return measured
