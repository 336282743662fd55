"""Time to measure in, which the regions of a module share in each call.

A region may measure for about a second. A network of fourteen regions would take fourteen in its first call.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from zendnn_cffi.locks import new_lock

if TYPE_CHECKING:
    from fx_passes.region.region import ZenRegion
    from fx_passes.watched_module import WatchedModule

SHARED = 2.0  # times of one region that all of them have
_PAUSE_SECONDS = 1.0


class CallTime:
    """What is left of the time of one call.

    regions  that share it
    once     whether a call runs each of them once: one that asks again begins another call. Else a pause does.
    """

    def __init__(self, regions: Iterable[ZenRegion], *, once: bool = True) -> None:
        self._count, self._once = 0, once
        self._asked: WeakSet[ZenRegion] = WeakSet()
        self._left_seconds, self._ended = 0.0, -_PAUSE_SECONDS
        self._lock = new_lock()
        for region in regions:
            region.call_time = self
            self._count += 1

    def share(self, region: ZenRegion, seconds: float) -> float:
        """How long a region may measure, `seconds` at the most: its part of what those have that did not ask yet."""
        with self._lock:
            if self._begins_a_call(region):
                self._asked = WeakSet()
                self._left_seconds = SHARED * seconds
            self._asked.add(region)
            to_come = max(self._count - len(self._asked), 0)
            return min(seconds, self._left_seconds / (1 + to_come))

    def spend(self, seconds: float) -> None:
        """So long a region did measure."""
        with self._lock:
            self._left_seconds = max(self._left_seconds - seconds, 0.0)
            self._ended = time.perf_counter()

    def _begins_a_call(self, region: ZenRegion) -> bool:
        if not self._asked or self._once:
            return not self._asked or region in self._asked
        return time.perf_counter() - self._ended > _PAUSE_SECONDS


def share_call_time(module: WatchedModule) -> None:
    """Have a module's regions, and those of its optimized submodules, share the time of a call."""
    regions: list[Any] = [region for region in module.regions().values() if hasattr(region, "call_time")]
    if len(regions) > 1:
        CallTime(regions, once=not module.optimized_submodules)
