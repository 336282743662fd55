"""What tests of lowering share: made-up measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from fx_passes.candidates.candidates import Candidate
from fx_passes.search.measure import is_rival
from tests.support.made_up_times import prefer


@pytest.fixture
def torch_is_fastest(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> list[Candidate]:
    """PyTorch always wins; the candidates measured."""
    return prefer(monkeypatch, is_rival)
