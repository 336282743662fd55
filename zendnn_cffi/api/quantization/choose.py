"""Which layers compute in integers: the most time gained with the outputs within given limits.

Noise that single layers bring to the outputs adds, as a first model. So the choice is a knapsack; then it is checked on
the graph with all chosen layers rounded, and layers go back to float by the worst error for their gain until it fits
(after NNCF's quantize_with_accuracy_control, which has no times to go by).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsFloat, SupportsIndex

from fx_passes.search.progress import ProgressBar
from zendnn_cffi.api.quantization.fake_quantized import FakeQuantized
from zendnn_cffi.api.quantization.knapsack import Knapsack
from zendnn_cffi.primitives import checks

_CALLS_ALONE = 8  # inputs that a layer's own error is measured on
_POINTS = 12  # of the frontier that is reported
_STEPS = 48  # of the frontier that accuracies are looked for on
_MOST_PUT_BACK = 8
_LEAST_DB = -3000.0  # less is beyond float64, as a ratio


@dataclass(frozen=True)
class Limits:
    """What the outputs have to keep to; None where there is no such limit.

    budget_db  least signal to noise of the outputs over the calibration inputs, dB
    accuracy   a number for a module, higher is better; it may fall by max_drop below `float_accuracy`
    """

    budget_db: float | None = None
    accuracy: Callable[[Any], float] | None = None
    max_drop: float = 0.0
    float_accuracy: float = math.nan

    @property
    def noise(self) -> float:
        """The most noise over signal."""
        return math.inf if self.budget_db is None else 10 ** (-max(self.budget_db, _LEAST_DB) / 10)

    def allows(self, accuracy: float) -> bool:
        """Whether a module of this accuracy will do."""
        return self.accuracy is None or self.float_accuracy - accuracy <= self.max_drop


def as_accuracy(found: Any) -> float:
    """What a user's function says of a module, as a number. Raises TypeError for what is none, as "0.9"."""
    if isinstance(found, SupportsFloat | SupportsIndex) and not isinstance(found, str):  # numpy's strings are both
        try:
            return float(found)
        except (
            TypeError,
            ValueError,
            RuntimeError,
            OverflowError,
        ):  # an array or tensor of several numbers, or of complex ones
            pass
    raise TypeError(f"accuracy must return a number, got {checks.describe(found)}")


class Choice(NamedTuple):
    """What a search came to."""

    layers: tuple[str, ...]
    alone: Mapping[str, float]
    gains: Mapping[str, float]
    frontier: tuple[tuple[float, float, int], ...]
    limits: Limits


class Search:
    """Measures each layer alone, and chooses.

    alone  noise over signal of the outputs with just this layer in integers
    gains  milliseconds that integers save this layer, at least 0
    layers  that may be in integers (default: all that can be)
    """

    def __init__(
        self, fake: FakeQuantized, gains: Mapping[str, float], limits: Limits, layers: Sequence[str] | None = None
    ) -> None:
        self.gains, self._fake, self._limits = dict(gains), fake, limits
        self._names = names = fake.layers if layers is None else list(layers)
        self.alone: dict[str, float] = {}
        with ProgressBar("zendnn_cffi: errors of single layers") as show:
            for number, name in enumerate(names, 1):
                self.alone[name] = fake.noise([name], _CALLS_ALONE)
                show(number, len(names))
        self._knapsack = Knapsack([self.gains[name] for name in names], [self.alone[name] for name in names])

    def choose(self) -> list[str]:
        """The layers for integers, in execution order; none where nothing else keeps to the limits."""
        if self.fits(self._names):
            return list(self._names)
        chosen = self._named(self._knapsack.best(min(self._limits.noise, math.fsum(self.alone.values()))))
        if self._limits.accuracy is not None and not self.fits(chosen):
            chosen = self._first_that_fits()
        while chosen and not self.fits(chosen):
            chosen = self.smaller(chosen)
        return self._put_back(chosen) if self._limits.accuracy is None else chosen

    def fits(self, layers: Collection[str]) -> bool:
        """Whether the model keeps to the limits with these layers rounded."""
        if self._limits.budget_db is not None and self._fake.noise(layers) > self._limits.noise:
            return False
        if self._limits.accuracy is None:
            return True
        self._fake.switch(layers)
        self._fake.state.restore(self._fake.module)
        return self._limits.allows(as_accuracy(self._limits.accuracy(self._fake.module)))

    def smaller(self, layers: Sequence[str], noise_share: float = 1.0) -> list[str]:
        """Without the worst by error for its gain: one at least, and so many that their noise falls to this share."""
        kept = sorted(layers, key=lambda name: self.alone[name] / max(self.gains[name], 1e-9))
        goal = noise_share * math.fsum(self.alone[name] for name in kept)
        kept.pop()
        while kept and math.fsum(self.alone[name] for name in kept) > goal:
            kept.pop()
        return [name for name in self._names if name in kept]

    def frontier(self, float_ms: float, int8_ms: float) -> list[tuple[float, float, int]]:
        """(milliseconds, noise over signal, number of layers in integers) of the best choices, all layers first.

        The time lies between those of the float model and of all layers in integers, by the layers' share of all gains.
        Noise is measured, and choices are left out that a faster one beats by that.
        """
        points: list[tuple[float, float, int]] = []
        whole = math.fsum(self.gains.values())
        for items in self._knapsack.frontier(_POINTS):
            layers = self._named(items)
            noise = self._fake.noise(layers, _CALLS_ALONE)
            if not points or noise < points[-1][1]:
                gain = math.fsum(self.gains[name] for name in layers)
                points.append((float_ms - (float_ms - int8_ms) * (gain / whole if whole else 0.0), noise, len(layers)))
        return points

    def _named(self, items: Sequence[int]) -> list[str]:
        return [self._names[item] for item in items]

    def _first_that_fits(self) -> list[str]:
        """Of the frontier, by bisection: more layers in integers are taken for less accurate."""
        choices = [self._named(items) for items in self._knapsack.frontier(_STEPS)]
        low, high = 0, len(choices) - 1  # the last is the float model
        while low < high:
            middle = (low + high) // 2
            if self.fits(choices[middle]):
                high = middle
            else:
                low = middle + 1
        return choices[high]

    def _put_back(self, chosen: list[str]) -> list[str]:
        """With layers that fit after all: the model of noise is a first one."""
        left = sorted(set(self._names) - set(chosen), key=lambda name: self.alone[name] / max(self.gains[name], 1e-9))
        for name in left[:_MOST_PUT_BACK]:
            if self.fits([*chosen, name]):
                chosen = [*chosen, name]
        return [name for name in self._names if name in chosen]
