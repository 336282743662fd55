"""Who compares results itself leaves checks before first use out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_thread = threading.local()


@contextmanager
def unchecked() -> Iterator[None]:
    """Leave checks out in this thread: who chooses in here compares results itself."""
    before = getattr(_thread, "unchecked", False)
    _thread.unchecked = True
    try:
        yield
    finally:
        _thread.unchecked = before


def is_unchecked() -> bool:
    """Whether that is so in this thread."""
    return getattr(_thread, "unchecked", False)
