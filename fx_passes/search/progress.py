"""A progress bar on the terminal for measurements that take long."""

from __future__ import annotations

import sys
import time
from types import TracebackType

_PATIENCE_SECONDS = 2.0
_WIDTH = 30


class ProgressBar:
    """Shows `done` of `total` on stderr, if that is a terminal, once two seconds have passed; leaves nothing behind.

    with ProgressBar("measuring") as show:
        show(3, 10)
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._start = time.monotonic()
        self._shown = 0

    def __enter__(self) -> ProgressBar:
        return self

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._start < _PATIENCE_SECONDS or not _is_terminal():
            return
        filled = _WIDTH * done // max(total, 1)
        line = f"{self.title} [{'#' * filled}{'.' * (_WIDTH - filled)}] {done}/{total}"
        self._write("\r" + line.ljust(self._shown))
        self._shown = len(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._write("\r" + " " * self._shown + "\r")

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):  # closed meanwhile
            self._shown = 0


def _is_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:
        return False
