"""Which input signatures are worth a program: making one takes as long as many calls.

A region's first signatures are lowered when they are met. Where there are more, as with texts of every length, plain
PyTorch runs a further one until that took about as long as a program will save: the rule of who rents skis until the
rent reaches the price. So a model whose shapes never return is as fast as PyTorch, and one whose shapes do return
soon has its programs.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

AT_ONCE = 16  # signatures of a region, lowered when they are first met
SURELY = 0.5  # of PyTorch's time, which a program is taken to save where that was not measured
TO_REPLACE = 16.0  # times as patient where a program takes another's place: that one may be wanted again
PER_TURN = 100  # programs that took another's place: then it is twice as patient, as they may go round for ever
_MOST_WAITING = 4096
_warms_up: ContextVar[bool] = ContextVar("zendnn_cffi_warms_up", default=False)


@contextmanager
def warm_up() -> Iterator[None]:
    """Inside, calls of optimized modules make a program for whatever sizes they meet, at once.

    Elsewhere the first 16 combinations of input sizes that a region meets are optimized at once. A further one runs as
    plain PyTorch until that took about as long as its program will save: inputs of ever new sizes do not pay for
    programs that are used once. Before a service begins, or before `save`, call the module for each size inside:

        with torch.inference_mode(), zendnn_cffi.warm_up():
            for batch in range(1, 65):
                fast(images[:batch])

    It holds for calls of this thread (of this asyncio task).
    """
    token = _warms_up.set(True)
    try:
        yield
    finally:
        _warms_up.reset(token)


class Patience:
    """Of one region.

    at_once  how many signatures are lowered when they are first met
    gain     the share of plain PyTorch's time that its programs save, as measured
    """

    def __init__(self) -> None:
        self.at_once: float = AT_ONCE
        self.gain = SURELY
        self.clear()

    def clear(self) -> None:
        """Begin anew: the region's programs are gone."""
        self._lowered = self._replaced = 0
        self._prices_s: deque[float] = deque(maxlen=5)  # the first ones measure, later ones do not
        self._spent_s: OrderedDict[Hashable, float] = OrderedDict()

    @property
    def waiting(self) -> int:
        """How many signatures wait for a program."""
        return len(self._spent_s)

    def note_lowered(self, signature: Hashable, seconds: float, gain: float | None, took_a_place: bool) -> None:
        """A program was made for a signature in so much time; gain: as measured, None where it was not."""
        self._lowered += 1
        self._replaced += took_a_place
        self._prices_s.append(seconds)
        self._spent_s.pop(signature, None)
        if gain is not None:
            self.gain = min(max(gain, 0.1), 1.0)

    def lets_wait(self, signature: Hashable, takes_a_place: bool) -> bool:
        """Whether plain PyTorch is to run for a signature that has no program."""
        if self._lowered < self.at_once or not self._lowered or _warms_up.get():
            return False
        price_s = sorted(self._prices_s)[len(self._prices_s) // 2] / self.gain
        if takes_a_place:
            price_s *= TO_REPLACE * 2.0 ** min(self._replaced // PER_TURN, 20)
        return self._spent_s.get(signature, 0.0) < price_s

    def run(self, signature: Hashable, plain: Callable[[Sequence[Any]], Any], inputs: Sequence[Any]) -> Any:
        """Run plain PyTorch, and note what that took."""
        begun = time.perf_counter()
        outputs = plain(inputs)
        self._spent_s[signature] = self._spent_s.get(signature, 0.0) + time.perf_counter() - begun
        if len(self._spent_s) > _MOST_WAITING:
            with suppress(KeyError):  # another thread cleared it
                self._spent_s.popitem(last=False)
        return outputs
