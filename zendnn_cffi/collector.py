"""Python's collector of garbage cycles, kept from looking at what is made to stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection inside: imports and programs make many objects that stay, and with PyTorch loaded one takes 0.1 s.

    Where threads do so at once, the first to leave lets it run again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
