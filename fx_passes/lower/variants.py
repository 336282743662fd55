"""The ways to run a region: as one program, in slices of the batch, or as plain PyTorch; the fastest is kept."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from fx_passes.lower.batch import is_batchwise
from fx_passes.lower.compile import LoweredRegion, lower_region, region_key
from fx_passes.lower.context import NotLowered
from fx_passes.lower.specs import RegionValues, TensorSpec
from fx_passes.plan.prepack import WeightStore
from fx_passes.search.database import Result
from fx_passes.search.disturbance import measuring
from fx_passes.search.tuner import Tuner
from zendnn_cffi.program import OutputSpec, Program
from zendnn_cffi.sliced_program import SlicedProgram

if TYPE_CHECKING:
    from fx_passes.region import RegionOptions

log = logging.getLogger("zendnn_cffi.lower")

MEASURED_SIGNATURES = 3  # per region; further shapes go by the nearest of those
WHOLE, PLAIN = "whole", "plain"
Run = Callable[[Sequence[torch.Tensor]], Any]
# A slice's largest activation should fit these: the second-level caches of two cores, a share of the third level.
_CACHES_BYTES = (2 << 20, 12 << 20)
_LARGE_BYTES = 4 << 20  # no slices below: everything is in cache anyway
_ROUNDS, _ENOUGH_SECONDS = 7, 1.5
_CLEARLY_FASTER = 0.9  # plain PyTorch must be this much faster before it gets the region back


def choose_variant(
    graph: fx.Graph,
    inputs: Sequence[torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    weights: WeightStore,
    options: RegionOptions,
    run_plain: Callable[[Sequence[torch.Tensor]], Any],
) -> LoweredRegion:
    """Return the fastest way to run the region on inputs like these; graph is not edited.

    run_plain  runs the region as plain PyTorch
    Raises     NotLowered where no primitive fits, or plain PyTorch is faster.
    """
    specs = [TensorSpec.of(tensor) for tensor in inputs]

    def lower(batch_specs: Sequence[TensorSpec]) -> LoweredRegion:
        return lower_region(copy.deepcopy(graph), batch_specs, parameters, weights, options)

    if options.tune == "off":
        return lower(specs)
    if options.tune == "auto" and (near := _nearest(graph, specs)) is not None:
        options = replace(options, tune="near")
        if near.reason:
            raise NotLowered(f"{near.reason} (found for {', '.join(map(str, near.specs))})")
        return lower(specs)
    try:
        lowered = _fastest(graph, specs, inputs, parameters, options, run_plain, lower)
    except NotLowered as reason:
        _history.setdefault(graph, []).append(Measured(tuple(specs), str(reason)))
        raise
    _history.setdefault(graph, []).append(Measured(tuple(specs), ""))
    return lowered


@dataclass(frozen=True)
class Measured:
    """An input signature that a region was measured for; reason: why plain PyTorch won there, else empty."""

    specs: tuple[TensorSpec, ...]
    reason: str


_history: WeakKeyDictionary[fx.Graph, list[Measured]] = WeakKeyDictionary()


def _nearest(graph: fx.Graph, specs: Sequence[TensorSpec]) -> Measured | None:
    """The measured signature nearest in size, once a region has met several; None where this one is to be measured.

    A region that is called with many shapes (sequence lengths) stops measuring: what won at the nearest shape is used.
    """
    measured = [m for m in _history.get(graph, ()) if _alike(m.specs, specs)]
    if len(measured) < MEASURED_SIGNATURES:
        return None

    def distance(m: Measured) -> float:
        return sum(abs(math.log(a.numel / b.numel)) for a, b in zip(m.specs, specs, strict=True))

    return min(measured, key=distance)


def _alike(a: Sequence[TensorSpec], b: Sequence[TensorSpec]) -> bool:
    """Whether two signatures differ in sizes alone."""
    return [(s.ndim, s.dtype) for s in a] == [(s.ndim, s.dtype) for s in b]


def _fastest(
    graph: fx.Graph,
    specs: Sequence[TensorSpec],
    inputs: Sequence[torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    options: RegionOptions,
    run_plain: Callable[[Sequence[torch.Tensor]], Any],
    lower: Callable[[Sequence[TensorSpec]], LoweredRegion],
) -> LoweredRegion:
    """Measure the variants, or remember what was measured; NotLowered where plain PyTorch wins."""
    values = RegionValues(graph, specs, parameters)
    database, key = Tuner(options.tune).database, region_key(graph, specs, parameters, options)
    built: dict[str, LoweredRegion] = {}

    def build(name: str) -> LoweredRegion:
        if name not in built:
            built[name] = lower(specs) if name == WHOLE else _sliced(int(name), values, specs, graph, lower)
        return built[name]

    def runs() -> dict[str, Run]:
        """What there is to measure; slices that cannot be made are no variant."""
        found: dict[str, Run] = {}
        for name in names[:-1]:
            try:
                found[name] = build(name).program
            except (NotLowered, RuntimeError) as reason:
                if name == WHOLE:
                    raise
                log.debug("no slices of %s: %s", name, reason)
        return {**found, PLAIN: run_plain}

    names = [WHOLE, *map(str, slice_sizes(graph, values)), PLAIN]
    known = {name: database.get(f"{key} {name}") for name in names}
    if None in known.values():
        there_are = runs()
        with measuring(database):
            measured = measure_in_turns(there_are, inputs)
            known = {name: Result(measured.get(name, math.inf), 0.0, True) for name in names}
            for name, result in known.items():
                if result is not None:
                    database.put(f"{key} {name}", result)
        database.save()
    times = {name: result.time_ns for name, result in known.items() if result is not None}
    best = min(times, key=lambda name: times[name] / (_CLEARLY_FASTER if name == PLAIN else 1.0))
    for name, lowered in built.items():
        if name != best:
            lowered.program.close()
    log.debug("variants: %s", ", ".join(f"{name} {ns / 1e6:.2f} ms" for name, ns in times.items()))
    if best == PLAIN:
        ours = min(ns for name, ns in times.items() if name != PLAIN)
        raise NotLowered(f"plain PyTorch is faster here: {times[PLAIN] / 1e6:.3f} ms against {ours / 1e6:.3f} ms")
    return build(best)


def slice_sizes(graph: fx.Graph, values: RegionValues) -> list[int]:
    """Batch sizes of slices worth trying, smaller than the batch: those whose activations fit a cache."""
    if not values.specs or not is_batchwise(graph, values):
        return []
    batch = next(iter(values.specs.values())).shape[0]
    largest = max(spec.numel * spec.dtype.itemsize for spec in values.specs.values())
    if batch < 2 or largest < _LARGE_BYTES:
        return []
    divisors = [n for n in range(1, batch) if batch % n == 0]
    sizes = {max([n for n in divisors if n * largest // batch <= limit], default=1) for limit in _CACHES_BYTES}
    return sorted(sizes)


def _sliced(
    size: int,
    values: RegionValues,
    specs: Sequence[TensorSpec],
    graph: fx.Graph,
    lower: Callable[[Sequence[TensorSpec]], LoweredRegion],
) -> LoweredRegion:
    """The region lowered for `size` samples, run over the batch slice by slice."""
    lowered = lower([replace(spec, shape=(size, *spec.shape[1:])) for spec in specs])
    results = next(iter(graph.find_nodes(op="output"))).all_input_nodes
    outputs = [OutputSpec(s.shape, s.strides, s.dtype) for s in (values.specs[node] for node in results)]
    for whole, part in zip(outputs, lowered.program.outputs, strict=True):
        if (size, *whole.shape[1:]) != part.shape or whole.strides != part.strides:
            raise NotLowered(f"a slice gives {part}, the batch {whole}")
    assert isinstance(lowered.program, Program)
    return replace(lowered, program=SlicedProgram(lowered.program, size, outputs))


def measure_in_turns(runs: Mapping[str, Run], inputs: Sequence[torch.Tensor]) -> dict[str, float]:
    """The fastest of a few runs of each, ns. They take turns, so that what else the machine does meets all alike.

    Plain PyTorch counts as no faster than the best other unless it was faster in every round.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(inputs)
    start = time.perf_counter()
    while len(times[PLAIN]) < _ROUNDS and (time.perf_counter() - start < _ENOUGH_SECONDS or len(times[PLAIN]) < 2):
        for name, run in runs.items():
            begun = time.perf_counter_ns()
            run(inputs)
            times[name].append(float(time.perf_counter_ns() - begun))
    best = {name: min(rounds) for name, rounds in times.items()}
    ours = min(best, key=lambda name: math.inf if name == PLAIN else best[name])
    if any(plain >= own for plain, own in zip(times[PLAIN], times[ours], strict=True)):
        best[PLAIN] = max(best[PLAIN], best[ours])
    return best
