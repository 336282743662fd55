"""The ways to run a region: as one program, in slices of the batch, or as plain PyTorch; the fastest is kept."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fx_passes.lower.batch import is_batchwise
from fx_passes.lower.compile import LoweredRegion, lower_region
from fx_passes.lower.context import NotLowered
from fx_passes.lower.specs import RegionValues, TensorSpec
from fx_passes.plan.prepack import WeightStore
from fx_passes.search.database import Result
from fx_passes.search.tuner import Tuner
from zendnn_cffi.program import OutputSpec, Program, SlicedProgram

if TYPE_CHECKING:
    from fx_passes.region import RegionOptions

log = logging.getLogger("zendnn_cffi.lower")

WHOLE, PLAIN = "whole", "plain"
# A slice's largest activation should fit these: the second-level caches of two cores, a share of the third level.
_CACHES_BYTES = (2 << 20, 12 << 20)
_LARGE_BYTES = 4 << 20  # no slices below: everything is in cache anyway
_RUNS, _ENOUGH_SECONDS = 5, 0.5
_CLEARLY_FASTER = 0.95  # plain PyTorch must be this much faster before it gets the region back


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
    values = RegionValues(graph, specs, parameters)
    database, key = Tuner(options.tune).database, _fingerprint(graph, specs, parameters, options)
    built: dict[str, LoweredRegion] = {}

    def build(name: str) -> LoweredRegion:
        if name not in built:
            built[name] = lower(specs) if name == WHOLE else _sliced(int(name), values, specs, graph, lower)
        return built[name]

    def time_ns(name: str) -> float:
        known = database.get(f"{key} {name}")
        if known is None:
            known = _measure(run_plain if name == PLAIN else build(name).program, inputs)
            database.put(f"{key} {name}", known)
        return known.time_ns

    names = [WHOLE, *map(str, slice_sizes(graph, values)), PLAIN]
    times = {name: time_ns(name) for name in names}
    times[PLAIN] /= _CLEARLY_FASTER
    best = min(times, key=times.__getitem__)
    database.save()
    for name, lowered in built.items():
        if name != best:
            lowered.program.close()
    log.debug("variants: %s", ", ".join(f"{name} {ns / 1e6:.2f} ms" for name, ns in times.items()))
    if best == PLAIN:
        times[PLAIN] *= _CLEARLY_FASTER
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


def _measure(run: Callable[[Sequence[torch.Tensor]], Any], inputs: Sequence[torch.Tensor]) -> Result:
    """The fastest of a few runs, after one to warm up."""
    run(inputs)
    best, spent, runs = math.inf, 0.0, 0
    while runs < _RUNS and spent < _ENOUGH_SECONDS:
        start = time.perf_counter()
        run(inputs)
        elapsed = time.perf_counter() - start
        best, spent, runs = min(best, elapsed), spent + elapsed, runs + 1
    return Result(best * 1e9, 0.0, True)


def _fingerprint(
    graph: fx.Graph, specs: Sequence[TensorSpec], parameters: Mapping[str, torch.Tensor], options: RegionOptions
) -> str:
    """A key that is equal for the same graph on the same shapes, of parameters too, with the same options."""
    shapes = {name: TensorSpec.of(value) for name, value in parameters.items()}
    text = f"{graph}|{specs}|{shapes}|{options}"
    return "region " + hashlib.sha256(text.encode()).hexdigest()
