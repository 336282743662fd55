"""Which sizes torch.export leaves free, and how long it may follow them through a forward.

    ALL      every size that the model does not depend on; where that takes too long,
    BATCH    the first size of each tensor alone; where that takes too long as well,
    NOTHING  all sizes are the example's

An arithmetic of sizes, as in windows over an image, makes each operation after it slower to follow. The batch takes no
part in it. What is found is kept with the graph, so that making it again does not spend the time again.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import NamedTuple

from fx_passes.trace.time_limit import Limit


class Free(enum.IntEnum):
    """Which sizes of the arguments may be free."""

    NOTHING, BATCH, ALL = range(3)


SECONDS = 4.0  # of CPU time, for a model with all that is tried of it, where sizes become long terms
LONGEST = 12.0  # symbols and operations, a tensor on average: BERT 1.8, Deformable DETR 5 to 8, Swin 28 to 58
_FIXED = {
    Free.NOTHING: "Sizes are those of the example",
    Free.BATCH: "Sizes but the first of each argument are those of the example",
}


class FreeSizes(NamedTuple):
    """Which sizes may be free, and why not all."""

    free: Free = Free.ALL
    because: str = ""

    @property
    def note(self) -> str:
        """What explain() says of it; "" where all may be free."""
        said = _FIXED.get(self.free)
        return "" if said is None else f"{said} ({self.because}): others run as plain PyTorch."

    def fewer(self) -> FreeSizes:
        """The next fewer, after following these took too long."""
        return FreeSizes(Free(self.free - 1), "following all that could be free takes too long")


ALL = FreeSizes()
ASKED_FOR_NONE = FreeSizes(Free.NOTHING, "dynamic=False")


class TimeLeft:
    """The CPU time that following free sizes may still take, for a model and what is tried of its submodules."""

    def __init__(self) -> None:
        self._left = dict.fromkeys((Free.ALL, Free.BATCH), SECONDS)

    @contextlib.contextmanager
    def limit(self, free: Free) -> Iterator[None]:
        """Raise TooLong in this block once no time is left for so many free sizes; there is no limit for NOTHING."""
        if free is Free.NOTHING:
            yield
            return
        limit = Limit(self._left[free], LONGEST)
        try:
            with limit:
                yield
        finally:
            self._left[free] = min(self._left[free], limit.left)
