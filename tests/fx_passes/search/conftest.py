from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fx_passes.search.tuner import database_for


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for results that no other test writes to."""
    monkeypatch.setenv("ZENDNN_CFFI_CACHE", str(tmp_path))
    database_for.cache_clear()
    yield tmp_path
    database_for.cache_clear()
