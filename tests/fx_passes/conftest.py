"""What tests of the compiler share: results of measurements go to a folder of the test run, never the user's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured results in a folder of this run, kept however busy the machine is."""
    from fx_passes.region import later
    from fx_passes.search import disturbance, turn
    from fx_passes.search.tuner import database_for

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZENDNN_CFFI_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("ZENDNN_CFFI_SHIPPED_TIMES", "")  # estimates are arithmetic on every machine
        patch.setattr(disturbance, "involuntary_switches", lambda: 0)
        patch.setattr(disturbance, "waited_ns", dict)  # as where the kernel does not tell
        for module in (later, turn):  # other threads of the tests' process have computed
            patch.setattr(module, "team_sleeps", lambda threads: False)
        database_for.cache_clear()
        yield
    database_for.cache_clear()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for results that no other test writes to."""
    from fx_passes.search.tuner import database_for

    monkeypatch.setenv("ZENDNN_CFFI_CACHE", str(tmp_path))
    database_for.cache_clear()
    yield tmp_path
    database_for.cache_clear()
