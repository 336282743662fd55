"""Memory that moves from ordinary pages onto huge ones later, by a thread, while calls go on.

In a virtual machine the host may have no memory behind a free huge page yet: finding it takes up to 4 ms for each. The
512 ordinary pages of the same size, which were used lately, take 0.8. So what a first call packs may begin on these.
The kernel copies each huge page's worth to one (MADV_COLLAPSE); addresses and contents stay.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from typing import Any

from zendnn_cffi.locks import OneForEachProcess, begun, new_lock
from zendnn_cffi.runtime.madvise import madvise

HUGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25  # since Linux 6.1; Python has no name for it
DELAY_SECONDS = 3.0  # from the first memory on: other processes that started at the same time have answered by then
_PAUSE_SECONDS = 0.02  # after each huge page: what runs meanwhile waits for a few of them, not for all
Part = tuple["weakref.ref[Any]", int, int]


class Collapsing(OneForEachProcess):
    """The thread, which exists while there is something to move. One for each process."""

    def _begin_anew(self) -> None:
        self._lock: Any = new_lock()
        self._waiting: list[Part] = []
        self._thread: threading.Thread | None = None

    def add(self, owner: object, address: int, size_bytes: int) -> None:
        """Move memory later, unless its owner is gone by then. The address is a huge page's boundary."""
        with self._lock:
            self._waiting.append((weakref.ref(owner), address, size_bytes))
            if self._thread is None:
                self._thread = begun(self._run, "huge pages")

    def _run(self) -> None:
        pause = threading.Event()
        pause.wait(DELAY_SECONDS)
        while (part := self._next()) is not None:
            move(*part, pause)

    def _next(self) -> Part | None:
        with self._lock:
            if self._waiting:
                return self._waiting.pop(0)
            self._thread = None
            return None


def move(owner: weakref.ref[Any], address: int, size_bytes: int, pause: threading.Event | None = None) -> None:
    """Ask for huge pages, and copy to them one after the other; what the kernel refuses stays as it is."""
    give_advice = madvise()
    for begin in range(0, size_bytes, HUGE_PAGE_BYTES):
        held = owner()
        if held is None:
            return
        if begin == 0:
            give_advice(address, size_bytes, mmap.MADV_HUGEPAGE)
        give_advice(address + begin, min(HUGE_PAGE_BYTES, size_bytes - begin), MADV_COLLAPSE)
        del held
        if pause is not None:
            pause.wait(_PAUSE_SECONDS)


collapsing = Collapsing()
