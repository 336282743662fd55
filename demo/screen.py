"""Headings, progress lines and result lines for a terminal; plain text when the output is not one."""

from __future__ import annotations

import sys
import time

BAR_WIDTH = 28


def heading(text: str) -> None:
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n{bold}{text}{plain}\n{'-' * len(text)}", flush=True)


def line(label: str, value: str) -> None:
    print(f"  {label:<34} {value}", flush=True)


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """Return a bar of which `share` (0..1) is filled."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "·" * (width - filled)


class Progress:
    """A line that fills up: `with Progress("training", 10) as step: ... step("accuracy 97%")`."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.done, self.note = label, total, 0, ""
        self.live = sys.stdout.isatty()

    def __enter__(self) -> Progress:
        self.began = time.perf_counter()
        self._show()
        return self

    def __call__(self, note: str = "") -> None:
        self.done, self.note = self.done + 1, note
        self._show()

    def __exit__(self, *_: object) -> None:
        self.note += f"  {time.perf_counter() - self.began:.1f} s"
        self._show(last=True)

    def _show(self, last: bool = False) -> None:
        if self.live or last:
            start, end = "\r\033[K" if self.live else "", "\n" if last else ""
            text = f"  {self.label:<34} {bar(self.done / self.total)}  {self.note}"
            print(start + text, end=end, flush=True)
