"""The collector stands still inside, and is as it was afterwards."""

from __future__ import annotations

import gc

import pytest

from zendnn_cffi.collector import collector_paused


@pytest.mark.parametrize("enabled", (True, False))
def test_it_is_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(KeyError), collector_paused():
            assert not gc.isenabled()
            with collector_paused():
                pass
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()


@pytest.mark.parametrize("enabled", (True, False))
def test_what_makes_garbage_ends_it_early(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with collector_paused() as resume:
            resume()
            assert gc.isenabled() == enabled
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()
