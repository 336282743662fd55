"""Python's collector of garbage cycles, kept from looking at what is made to stay."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[Callable[[], None]]:
    """No collection inside: imports and programs make many objects that stay, and with PyTorch loaded one takes 0.2 s.

    Gives a function that ends it early, for what turns out to make garbage. Where threads do so at once, the first to
    leave lets it run again.
    """
    enabled = gc.isenabled()
    gc.disable()

    def resume() -> None:
        if enabled:
            gc.enable()

    try:
        yield resume
    finally:
        resume()
