"""What of ours was chosen by estimate, for want of a quiet time to measure: such times are not ours to compare."""

from __future__ import annotations

import sys
from typing import Any


def settle() -> None:
    """Measure what first calls left out: in a process that is stopped between turns, no thread does."""
    module: Any = sys.modules.get("fx_passes.region.later")
    if module is not None:
        module.later.measure_now()


def provisional() -> int:
    """How many regions of this process run what was chosen by estimate."""
    return sum(region.is_provisional for region in _regions())


def _regions() -> list[Any]:
    """Those of ours; none where another contender runs."""
    module: Any = sys.modules.get("fx_passes.region.region")
    return [] if module is None else module.living_regions()
