"""This CPU as one that lacks some of its instructions."""

from __future__ import annotations

import pytest

from zendnn_cffi.engine.loaded import Library


def take_away(instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library say that its kernels may not use instruction sets of such a name ("avx512", "vnni")."""
    runs = Library.runs
    monkeypatch.setattr(Library, "runs", lambda self, name: instructions not in name and runs(self, name))
