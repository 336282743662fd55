"""A progress bar, on a terminal or in a notebook, for measurements that take long."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

_PATIENCE_SECONDS = 2.0
_WIDTH = 30


class ProgressBar:
    """Shows `done` of `total` once two seconds have passed, and leaves nothing behind.

    It is shown on stderr, if that is a terminal, and below the cell in a notebook.

    with ProgressBar("measuring") as show:
        show(3, 10)
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._start = time.monotonic()
        self._shown = 0
        self._cell: Any = None  # where a notebook shows it

    def __enter__(self) -> ProgressBar:
        return self

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._start < _PATIENCE_SECONDS:
            return
        filled = _WIDTH * done // max(total, 1)
        line = f"{self.title} [{'#' * filled}{'.' * (_WIDTH - filled)}] {done}/{total}"
        if _is_terminal():
            self._write("\r" + line.ljust(self._shown))
            self._shown = len(line)
        elif _in_notebook():
            self._display(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._write("\r" + " " * self._shown + "\r")
        if self._cell is not None:
            self._display("")

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):  # closed meanwhile
            self._shown = 0

    def _display(self, line: str) -> None:
        """Show a line in place of the one before."""
        from IPython.display import display

        shown = {"text/plain": line}
        if self._cell is None:
            self._cell = display(shown, raw=True, display_id=True)
        else:
            self._cell.update(shown, raw=True)


def _in_notebook() -> bool:
    """Whether this thread runs the cells of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None and threading.current_thread() is threading.main_thread()


def _is_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:
        return False
