"""The progress bar: on terminals alone, after a while, and gone at the end."""

from __future__ import annotations

import io

import pytest
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from fx_passes.search import progress
from tests.support.lowering import net, noise


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(text: str) -> str:
    """What a terminal shows after these characters: the last line, as overwritten."""
    shown: list[str] = []
    for part in text.split("\r"):
        shown[: len(part)] = part
    return "".join(shown).rstrip()


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """stderr as a terminal (not a fixture: pytest sets stderr anew before the test itself)."""
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.0)
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    return stream


def test_shows_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with progress.ProgressBar("measuring") as show:
        show(9, 10)
        assert screen(terminal.getvalue()) == f"measuring [{'#' * 27}...] 9/10"
        show(10, 10)
        assert "10/10" in screen(terminal.getvalue())
    assert screen(terminal.getvalue()) == ""


def test_silent_where_it_would_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 60.0)
    with progress.ProgressBar("measuring") as show:
        show(1, 2)
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    with progress.ProgressBar("measuring") as show:
        show(1, 2)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("stream", (None, io.StringIO()))
def test_no_stream_or_a_closed_one(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.0)
    if stream is not None:
        stream.close()
    monkeypatch.setattr("sys.stderr", stream)
    with progress.ProgressBar("measuring") as show:
        show(1, 2)


def test_first_call_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    gm = zendnn_cffi.optimize(net(lambda m, x: F.relu(m[0](x)), nn.Conv2d(3, 19, 3)))
    gm(noise(1, 3, 13, 11))
    assert "measuring" in terminal.getvalue()
    assert screen(terminal.getvalue()) == ""
