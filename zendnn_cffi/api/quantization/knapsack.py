"""The choice of items with the largest gain whose costs together stay in a budget, exact by dynamic programming.

Costs are real numbers (noise powers), so the table runs over gains: the least cost at which each gain can be had
(Martello and Toth, Knapsack Problems, 1990, 2.3). One table answers for every budget, which gives the whole frontier.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_STEPS = 20_000  # gains are rounded to this share of their sum


class Knapsack:
    """Items with a gain and a cost each, both at least 0.

    Each gain counts for at least one step of 1/20000 of the sum, so an item of no gain is taken where there is room.
    """

    def __init__(self, gains: Sequence[float], costs: Sequence[float]) -> None:
        self.costs = list(costs)
        whole = sum(gains)
        self._gains = [max(round(_STEPS * gain / whole), 1) if whole else 1 for gain in gains]
        self._least: npt.NDArray[np.float64] = np.full(sum(self._gains) + 1, np.inf)
        self._least[0] = 0.0
        self._taken = np.zeros((len(self.costs), self._least.size), dtype=bool)
        for item, (gain, cost) in enumerate(zip(self._gains, self.costs, strict=True)):
            with_it = self._least[: self._least.size - gain] + cost
            self._taken[item, gain:] = with_it < self._least[gain:]
            self._least[gain:] = np.minimum(self._least[gain:], with_it)

    def best(self, budget: float) -> list[int]:
        """The items of largest gain whose costs add up to at most budget; the cheapest such choice."""
        return self._items(int(np.flatnonzero(self._least <= budget)[-1])) if budget >= 0 else []

    def frontier(self, most: int) -> list[list[int]]:
        """At most `most` choices that no other beats in both gain and cost, from all items down to none."""
        finite = np.isfinite(self._least)
        from_above = np.minimum.accumulate(np.where(finite, self._least, np.inf)[::-1])[::-1]
        efficient = np.flatnonzero(finite & (self._least <= from_above))
        picked = np.unique(np.linspace(0, len(efficient) - 1, most).round().astype(int))
        return [self._items(int(gain)) for gain in efficient[picked][::-1]]

    def _items(self, gain: int) -> list[int]:
        found = []
        for item in reversed(range(len(self.costs))):
            if self._taken[item, gain]:
                found.append(item)
                gain -= self._gains[item]
        return found[::-1]
