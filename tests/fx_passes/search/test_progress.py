"""The progress bar: on terminals and in notebooks alone, after a while, and gone at the end."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace
from typing import Any

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


class Cell:
    """Stands for what IPython's display() returns."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, data: dict[str, str], **_: Any) -> None:
        self.lines.append(data["text/plain"])


def test_a_notebook_shows_one_line_and_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cells: list[Cell] = []

    def display(data: dict[str, str], **options: Any) -> Cell:
        assert options == {"raw": True, "display_id": True}
        cells.append(Cell())
        cells[-1].update(data)
        return cells[-1]

    def measure() -> None:
        with progress.ProgressBar("measuring") as show:
            show(1, 2)
            show(2, 2)

    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setattr("IPython.display.display", display)
    measure()
    assert not cells  # IPython is imported, but no kernel runs
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=object()))
    measure()
    other = threading.Thread(target=measure)  # measures when no calls come: no cell waits for it
    other.start()
    other.join()
    (cell,) = cells
    assert [line[-3:] for line in cell.lines] == ["1/2", "2/2", ""]


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
