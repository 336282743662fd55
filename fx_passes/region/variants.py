"""The ways to run a region: as one program, in slices of the batch, or as plain PyTorch; the fastest is kept."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fx_passes import ops
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.lower.context import NotLowered
from fx_passes.plan.prepack import WeightStore
from fx_passes.region.batch import is_batchwise
from fx_passes.region.compile import lower_region
from fx_passes.region.key import region_key
from fx_passes.region.lowered import LoweredRegion, sliced
from fx_passes.region.options import RegionOptions
from fx_passes.search.database import Result, kept_ns
from fx_passes.search.tuner import database_of
from fx_passes.search.turn import Turn
from zendnn_cffi.collector import collector_paused
from zendnn_cffi.values import dataclass

log = logging.getLogger("zendnn_cffi.lower")

MEASURED_SIGNATURES = 3  # per region; further shapes go by the nearest of those
WHOLE, PLAIN = "whole", "plain"
_TAKING_SIZES = frozenset(operation for operation, traits in ops.TRAITS.items() if traits.sizes_at is not None)
Run = Callable[[Sequence[torch.Tensor]], Any]
# A slice's largest activation should fit these: the second-level caches of two cores, a share of the third level.
_CACHES_BYTES = (2 << 20, 12 << 20)
_LARGE_BYTES = 4 << 20  # no slices below: everything is in cache anyway
# A slice is large enough if its largest activation exceeds this for every thread, and weights are the lesser part of
# what it reads. Batches beyond are not tried whole: no faster, and it takes more memory and longer to measure.
_ENOUGH_BYTES = 32 << 20
_ROUNDS, _FEWEST_ROUNDS, _ENOUGH_SECONDS = 7, 2, 1.5
_HOPELESS = 1.5  # what took this many times longer than the fastest is not run again
_LONG_NS, _VERY_LONG_NS = 1e8, 5e8  # if it took that long; the very first run of plain PyTorch also folds weights
_SHARE_OF_BUILDING = 0.8  # of a turn's time: then no further variant is made
_CLEARLY_FASTER = 0.9  # plain PyTorch must be this much faster before it gets the region back


def choose_variant(
    graph: fx.Graph,
    inputs: Sequence[torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    weights: WeightStore,
    options: RegionOptions,
    run_plain: Callable[[Sequence[torch.Tensor]], Any],
    turn: Turn | None = None,
    keep: bool = False,
) -> LoweredRegion:
    """Return the fastest way to run the region on inputs like these; graph is not edited.

    run_plain  runs the region as plain PyTorch
    turn       leave to measure (None: what the options say); where it leaves something out, the result is provisional
    keep       whether the result holds what it was built from
    Raises     NotLowered where no primitive fits, or plain PyTorch is faster.
    """
    specs = [TensorSpec.of(tensor) for tensor in inputs]
    turn = turn or turn_of(options)

    def lower(batch_specs: Sequence[TensorSpec], refined: bool = True, key: str = "") -> LoweredRegion:
        edited = copy.deepcopy(graph)
        return lower_region(
            edited, batch_specs, parameters, weights, options, turn=turn, refined=refined, keep=keep, key=key
        )

    def estimate() -> LoweredRegion:
        # Nodes, operations and graphs refer to each other. Objects that saw two collections would wait for one of all
        # objects, which with PyTorch loaded comes after dozens of input sizes. Whoever calls this collects the rest.
        with collector_paused():
            return lower(specs)

    if options.tune == "off":
        return estimate()
    if options.tune == "auto" and (near := _nearest(graph, specs)) is not None:
        options = replace(options, tune="near")
        if near.reason:
            raise NotLowered(f"{near.reason} (found for {', '.join(map(str, near.specs))})")
        return estimate()
    turn.is_one_of_several = bool(_history.get(graph))
    try:
        with turn, collector_paused() as turn.on_begin:  # who measures makes large garbage
            lowered = _fastest(graph, specs, inputs, parameters, options, run_plain, lower, turn)
    except NotLowered as reason:
        _remember(graph, specs, str(reason))
        raise
    _remember(graph, specs, "")
    return lowered


def turn_of(options: RegionOptions, interrupted: Callable[[], bool] | None = None) -> Turn:
    """Leave to measure: "full" has all the time it wants, and so has who may be interrupted."""
    threads = torch.get_num_threads()
    insists = options.tune == "full"
    seconds = math.inf if insists or interrupted is not None else options.tune_seconds
    return Turn(database_of(options.tune, threads), threads, seconds, insists=insists, interrupted=interrupted or bool)


@dataclass(frozen=True)
class Measured:
    """An input signature that a region was measured for; reason: why plain PyTorch won there, else empty."""

    specs: tuple[TensorSpec, ...]
    reason: str


_history: WeakKeyDictionary[fx.Graph, list[Measured]] = WeakKeyDictionary()


def _remember(graph: fx.Graph, specs: Sequence[TensorSpec], reason: str) -> None:
    others = [m for m in _history.get(graph, ()) if m.specs != tuple(specs)]
    _history[graph] = [*others, Measured(tuple(specs), reason)]


def _nearest(graph: fx.Graph, specs: Sequence[TensorSpec]) -> Measured | None:
    """The measured signature nearest in size, once a region has met several; None where this one is to be measured.

    A region that is called with many shapes (sequence lengths) stops measuring: what won at the nearest shape is used.
    """
    measured = [m for m in _history.get(graph, ()) if _alike(m.specs, specs)]
    if len(measured) < MEASURED_SIGNATURES or any(m.specs == tuple(specs) for m in measured):
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
    lower: Callable[..., LoweredRegion],
    turn: Turn,
) -> LoweredRegion:
    """Measure the variants, or remember what was measured; NotLowered where plain PyTorch wins.

    Where there are several, they compete as lowered at first, and the winner alone is refined. Where there is no leave
    to measure, the whole batch is taken.
    """
    database, key = turn.database, region_key(graph, specs, parameters, options)
    values = None if specs and specs[0].shape[:1] == (1,) else RegionValues(graph, specs, parameters)
    weights_bytes = sum(t.numel() * t.element_size() for t in parameters.values())
    ours = [WHOLE] if values is None else variant_names(graph, values, weights_bytes)
    if values is not None:
        ours = [n for n in ours if n == WHOLE or _keeps_shapes(int(n), graph, specs, values, parameters)] or [WHOLE]

    def build(name: str, refined: bool = True) -> LoweredRegion:
        if name == WHOLE or values is None:
            return lower(specs, refined, key)
        return sliced(int(name), values, specs, graph, lambda part: lower(part, refined))

    built: dict[str, LoweredRegion] = {}
    is_final = len(ours) == 1 or turn.left_out > 0  # of several, the winner is refined
    known = {name: database.get(f"{key} {name}") for name in dict.fromkeys((WHOLE, *ours, PLAIN))}
    times = {name: result.time_ns for name, result in known.items() if result is not None}
    if any(name not in times for name in (*ours, PLAIN)):
        built = _built(ours, lambda name: build(name, refined=len(ours) == 1), turn)
        times, doubtful = _measured(built, run_plain, inputs, turn)
        is_final = is_final or turn.left_out > 0
        turn.left_out += doubtful
        if not turn.left_out:  # what is provisional says nothing of the best there is
            for name, time_ns in (dict.fromkeys(ours, math.inf) | times).items():
                database.put(f"{key} {name}", Result(time_ns, 0.0, True))
            database.save()
    log.debug("variants: %s", ", ".join(f"{name} {ns / 1e6:.2f} ms" for name, ns in times.items()))
    best = min(times, key=lambda name: times[name] / (_CLEARLY_FASTER if name == PLAIN else 1.0))
    for name, lowered in built.items():
        if name != best or not is_final:
            lowered.program.close()
    if best == PLAIN:
        fastest = min(ns for name, ns in times.items() if name != PLAIN)
        raise NotLowered(f"plain PyTorch is faster here: {times[PLAIN] / 1e6:.3f} ms against {fastest / 1e6:.3f} ms")
    lowered = built[best] if is_final and best in built else build(best)
    return replace(lowered, gain=1.0 - times[best] / times[PLAIN]) if PLAIN in times else lowered


def _keeps_shapes(
    size: int,
    graph: fx.Graph,
    specs: Sequence[TensorSpec],
    values: RegionValues,
    parameters: Mapping[str, torch.Tensor],
) -> bool:
    """Whether each value of a slice has the whole one's shape, but for the batch, and is computed of the same numbers.

    In reshape(x, (8, -1)) the 8 is that of a batch of 8: slices of 2 would become 8 rows of a quarter's length. In
    x / x.size(0) the batch is the divisor.
    """
    try:
        parts = RegionValues(graph, [replace(spec, shape=(size, *spec.shape[1:])) for spec in specs], parameters)
    except (RuntimeError, ValueError, IndexError):  # no such shape at all
        return False
    shapes = {node: (size, *spec.shape[1:]) for node, spec in values.specs.items()}
    if not all(node in parts.specs and parts.specs[node].shape == shape for node, shape in shapes.items()):
        return False
    others = [node for node, number in values.numbers.items() if _is_other(number, parts.numbers.get(node))]
    return not any(user in values.specs and user.target not in _TAKING_SIZES for node in others for user in node.users)


def _is_other(number: Any, of_slice: Any) -> bool:
    """Whether numbers, sizes for instance, are others; what else is known of nodes has shapes, which were compared."""
    return all(isinstance(leaf, int | float) for leaf in tree_leaves(number)) and number != of_slice


def _measured(
    built: Mapping[str, LoweredRegion], run_plain: Run, inputs: Sequence[torch.Tensor], turn: Turn
) -> tuple[dict[str, float], bool]:
    """The time of each, and of plain PyTorch, ns. Where none may be measured, the first of ours counts as fastest.

    Beside other work, times tell the variants apart and say nothing of PyTorch: what shares its work more often waits
    more often for a thread that has no core. Plain PyTorch is left out then, until it is measured again.
    Returns  also whether PyTorch was left out for that
    """
    fewest_runs = (1 + _FEWEST_ROUNDS) * (1 + len(built))
    needed = fewest_runs * min(each.alone_ns * each.program.slices for each in built.values()) / 1e9
    if not turn.allows(needed=needed if turn.is_one_of_several else 0.0):
        return {next(iter(built)): 0.0}, False
    runs = {**{name: lowered.program for name, lowered in built.items()}, PLAIN: run_plain}
    with turn.measuring() as observed:
        times = {name: kept_ns(time_ns) for name, time_ns in measure_in_turns(runs, inputs).items()}
    doubtful = observed.disturbed and not turn.insists
    if doubtful:
        del times[PLAIN]
    return times, doubtful


def _built(names: Sequence[str], build: Callable[[str], LoweredRegion], turn: Turn) -> dict[str, LoweredRegion]:
    """What there is to measure; slices that cannot be made are no variant, and the whole batch is one if nothing is."""
    found: dict[str, LoweredRegion] = {}
    for name in names:
        if found and not turn.allows(_SHARE_OF_BUILDING):
            break
        try:
            found[name] = build(name)
        except (NotLowered, RuntimeError) as reason:
            if name == WHOLE:
                raise
            log.debug("no slices of %s: %s", name, reason)
    return found or {WHOLE: build(WHOLE)}


def variant_names(graph: fx.Graph, values: RegionValues, weights_bytes: int) -> list[str]:
    """What is worth trying: the whole batch, or enough of it, and sizes of slices whose activations fit a cache."""
    activations_bytes = [spec.numel * spec.dtype.itemsize for spec in values.specs.values()]
    largest = max(activations_bytes, default=0)
    if largest < _LARGE_BYTES or not is_batchwise(graph, values):
        return [WHOLE]
    if (batch := next(iter(values.specs.values())).shape[0]) == 1:
        return [WHOLE]
    divisors = [n for n in range(1, batch) if batch % n == 0]

    def is_enough(n: int) -> bool:
        enough_bytes = _ENOUGH_BYTES * torch.get_num_threads()
        return n * largest // batch > enough_bytes and n * sum(activations_bytes) // batch > 2 * weights_bytes

    slices = {max([n for n in divisors if n * largest // batch <= limit], default=1) for limit in _CACHES_BYTES}
    enough = next((n for n in divisors if is_enough(n)), None)
    if enough is None:
        return [WHOLE, *map(str, sorted(slices))]
    return [*map(str, sorted({*slices, enough}))]


def measure_in_turns(runs: Mapping[str, Run], inputs: Sequence[torch.Tensor]) -> dict[str, float]:
    """The fastest of a few runs of each, ns. They take turns, so that what else the machine does meets all alike.

    What takes long and falls far behind the fastest of ours is not run again. Plain PyTorch counts as no faster than
    the best other unless it was faster in every round.
    """
    left, times = dict(runs), {name: list[float]() for name in runs}
    _turn(left, inputs, times, long_ns=_VERY_LONG_NS)  # the first run of each: it counts where it is the only one
    for name in left:
        times[name].clear()
    start = time.perf_counter()
    for number in range(_ROUNDS):
        if number >= _FEWEST_ROUNDS and time.perf_counter() - start > _ENOUGH_SECONDS:
            break
        _turn(left, inputs, times, long_ns=_LONG_NS)
    best = {name: min(rounds) for name, rounds in times.items()}
    ours = min(best, key=lambda name: math.inf if name == PLAIN else best[name])
    if any(plain >= own for plain, own in zip(times[PLAIN], times[ours], strict=False)):
        best[PLAIN] = max(best[PLAIN], best[ours])
    return best


def _turn(
    left: dict[str, Run], inputs: Sequence[torch.Tensor], times: Mapping[str, list[float]], long_ns: float
) -> None:
    """Run each once; take out of `left` what took longer than long_ns and is far behind."""
    for name, run in left.items():
        begun = time.perf_counter_ns()
        run(inputs)
        times[name].append(float(time.perf_counter_ns() - begun))
    fastest = min(times[name][-1] for name in left if name != PLAIN)
    for name in [*left]:
        if times[name][-1] > max(long_ns, _HOPELESS * fastest):
            del left[name]
