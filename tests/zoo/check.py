"""Run one torchvision model eager and optimized: are the answers alike, how much did ZenDNN compute, who is faster?"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

import zendnn_cffi
from demo import vision
from tests.support.answers import TOLERANCE, offloaded, relative_error

# A turn of a contender: calls that are not counted, for the others have emptied the caches, then calls that are.
SETTLE, CALLS = 1, 3
FEWEST_ROUNDS, ENOUGH_SECONDS = 3, 15.0  # large models get fewer rounds than asked for
NOISE = 1.03  # a median up to this much longer is no difference

Run = Callable[[], object]


def ratio_quartiles(ours: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """The quartiles over rounds of our time divided by the other's."""
    low, middle, high = np.percentile(np.divide(ours, others), (25, 50, 75))
    return float(low), float(middle), float(high)


def is_slower(ratios: tuple[float, float, float]) -> bool:
    """Whether such quartiles say that ours is slower, beyond noise."""
    low, median, _ = ratios
    return median > NOISE and low > 1.0


@dataclass(frozen=True)
class Times:
    """Medians in ms of runs that took turns, and the quartiles over rounds of optimized's time / channels_last's."""

    eager_ms: float
    channels_last_ms: float
    optimized_ms: float
    ratios: tuple[float, float, float]

    @classmethod
    def of(cls, eager: Sequence[float], channels_last: Sequence[float], optimized: Sequence[float]) -> Times:
        """What the medians of the rounds say."""
        return cls(
            statistics.median(eager),
            statistics.median(channels_last),
            statistics.median(optimized),
            ratio_quartiles(optimized, channels_last),
        )

    @property
    def slower(self) -> bool:
        """Whether the optimized model is slower than eager channels_last, beyond noise."""
        return is_slower(self.ratios)

    def __str__(self) -> str:
        return (
            f"ms: eager {self.eager_ms:7.1f}, channels_last {self.channels_last_ms:7.1f}, "
            f"optimized {self.optimized_ms:7.1f} {'SLOWER' if self.slower else ''}"
        ).rstrip()


@dataclass(frozen=True)
class Verdict:
    """What came out; offloaded, nodes: operations that ZenDNN ran, of all that compute something."""

    name: str
    error: float
    offloaded: int
    nodes: int
    ready_s: float
    times: Times | None = None
    failure: str = ""

    @property
    def share(self) -> float:
        return self.offloaded / max(self.nodes, 1)

    @property
    def passed(self) -> bool:
        return not self.failure and self.error <= TOLERANCE

    @property
    def slower(self) -> bool:
        return self.times is not None and self.times.slower

    def __str__(self) -> str:
        if self.failure:
            return f"{self.name:20} FAILED  {self.failure}"
        return (
            f"{self.name:20} {'ok' if self.passed else 'WRONG':6} error {self.error:.1e}  "
            f"ZenDNN ran {self.offloaded:3} of {self.nodes:3} ({self.share:4.0%})  first call {self.ready_s:5.1f} s  "
            f"{self.times or ''}"
        ).rstrip()


def check(name: str, batch: int = 1, seed: int = 0, *, tune: str = "auto", rounds: int = 0) -> Verdict:
    """Return the verdict on the torchvision model `name` in float32; rounds > 0: with times, so many turns of each."""
    model = vision.build(name, seed)
    images = vision.image_batch(batch, vision.image_side(name), seed)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*could not be lowered")  # a defect of ours, not a right answer
        expected = model(images)
        began = time.perf_counter()
        optimized = zendnn_cffi.optimize(model, (images,), tune=tune)
        answer = optimized(images)
        ready_s = time.perf_counter() - began
        assert bool(expected.isfinite().all()), "the model itself overflowed"
        error = relative_error(answer, expected)
        times = _compare(model, optimized, images, rounds) if rounds else None
    ran, nodes, _ = offloaded([optimized])
    return Verdict(name, error, ran, nodes, ready_s, times)


def failed(name: str, failure: str) -> Verdict:
    """Return the verdict on a model that raised or ended the process."""
    nan = float("nan")
    return Verdict(name, nan, 0, 0, nan, failure=failure)


def _compare(model: torch.nn.Module, optimized: torch.nn.Module, images: torch.Tensor, rounds: int) -> Times:
    channels_last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    turned = images.contiguous(memory_format=torch.channels_last)
    runs: dict[str, Run] = {
        "eager": lambda: model(images),
        "channels_last": lambda: channels_last(turned),
        "optimized": lambda: optimized(images),
    }
    return Times.of(**in_turns(runs, rounds))


def in_turns(
    runs: Mapping[str, Run], rounds: int, calls: int = CALLS, enough_s: float = ENOUGH_SECONDS
) -> dict[str, list[float]]:
    """Return a median in ms per round of each; they take turns, so that what else the machine does meets all alike.

    calls     of each in a round
    enough_s  seconds after which no round begins, but for the fewest
    """
    medians: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    began = time.perf_counter()
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and time.perf_counter() - began > enough_s:
            break
        first = number % len(runs)
        for name in [*runs][first:] + [*runs][:first]:
            for _ in range(SETTLE):
                runs[name]()
            medians[name].append(statistics.median(_milliseconds(runs[name]) for _ in range(calls)))
    return medians


def _milliseconds(run: Run) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3
