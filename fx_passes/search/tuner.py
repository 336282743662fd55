"""Give every candidate its time: measured once and remembered, or estimated; and drop those whose numbers are wrong."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from fx_passes.candidates.candidates import Candidate, Operation, PrimitiveTemplate, measurable, weights_bytes
from fx_passes.candidates.layouts import Layout, Quantized
from fx_passes.candidates.specs import RegionValues
from fx_passes.lower.products.matrix_vector import NAME as MATRIX_VECTOR
from fx_passes.search.averages import geometric_mean
from fx_passes.search.cost import completed, estimate_ns, reorder_ns
from fx_passes.search.database import CHECKED, Database, Result, cache_folder, kept_ns
from fx_passes.search.equal_work import EqualWork
from fx_passes.search.from_memory import KEY as FROM_MEMORY
from fx_passes.search.from_memory import (
    LEAST_BYTES,
    exceed_the_cache,
    is_bound_by_weights,
    product_of,
    read_at_full_speed,
)
from fx_passes.search.from_memory import let_go as let_go_of_other_memory
from fx_passes.search.learned import learned_for
from fx_passes.search.measure import (
    CHECK_ONLY,
    Bench,
    is_rival,
    reorder_fingerprint,
    time_reorder,
)
from fx_passes.search.scratch import Scratch
from fx_passes.search.shipped import hints_for, times_for
from fx_passes.search.turn import Turn
from zendnn_cffi.engine.loaded import Library
from zendnn_cffi.errors import ZenDNNError
from zendnn_cffi.runtime.courtesy import give_way

log = logging.getLogger("zendnn_cffi.search")

TUNE_MODES = ("auto", "off", "full", "near")

_PROSPECTS = 1.6  # "auto" measures candidates estimated within this factor of the best; "full" measures them all
_NEAR_THE_BEST = 1.3  # what was measured within this factor is timed a second time
SHARE = 0.6  # of a turn's time, for measuring operations alone; the rest is for whole programs
_LARGE_BYTES = 8 << 20  # of weights: in no cache when the next call comes
_CALLS = 10  # a turn is as long as so many calls by estimate, if that is more than it has
Progress = Callable[[int, int], None]
Choose = Callable[[Operation, list[Candidate]], list[Candidate]]


@lru_cache(maxsize=64)
def database_for(threads: int, *, own_only: bool = False) -> Database:
    """The results of this machine with this many threads; own_only: without those that ship with the package."""
    from zendnn_cffi.engine.host import cpu_name
    from zendnn_cffi.engine.library import load

    library = load()
    machine = f"{cpu_name()}; ZenDNN {library.version}; {threads} threads{_build_of(library)}"
    if own_only:
        return Database(machine, cache_folder())
    return Database(machine, cache_folder(), times_for(threads), hints_for(threads))


def _build_of(library: Library) -> str:
    """A text that tells a build from AMD's published one of the same version: other kernels may be right in it."""
    if library.provider == "prebuilt":
        return ""
    about = os.stat(library.path)
    return f"; {library.config.get('sha256') or (library.path, about.st_size, about.st_mtime_ns)}"


def database_of(mode: str, threads: int) -> Database:
    """The results that a mode goes by: "full" measures what ships with the package, too."""
    return database_for(threads, own_only=True) if mode == "full" else database_for(threads)


class Tuner:
    """Prices candidates under one mode.

    mode      "auto": measure what may win, once; "full": measure everything; "off": estimates alone; "near": estimates,
              for one more shape of a region that was measured at several
    progress  called with (done, total) while measuring
    turn      leave to measure (None: without limit); what it does not allow is estimated
    """

    def __init__(self, mode: str = "auto", progress: Progress | None = None, turn: Turn | None = None) -> None:
        if mode not in TUNE_MODES:
            raise ValueError(f"tune must be one of {', '.join(TUNE_MODES)}, got {mode!r}")
        self.mode = mode
        self.progress = progress
        self.threads = torch.get_num_threads()
        self.turn = turn or Turn(database_of(mode, self.threads), self.threads)
        self.database = self.turn.database
        self.measured = 0
        self._learned = learned_for(self.threads)
        self._scratch = Scratch()
        self._wrong: dict[str, list[str]] = {}  # operation -> keys of the candidates found wrong
        self._keys: dict[tuple[int, ...], tuple[Candidate, str]] = {}  # by what candidates of other costs share
        self._equal_work = EqualWork()
        self._from_memory: set[Operation] = set()  # whose weights are in no cache when a call comes
        self._chosen: dict[Operation, list[Candidate]] = {}  # worth measuring; asked for in every round
        self._ratios: list[float] = []  # measured over estimated times, of the best candidates
        self._ratios_from_memory: dict[str, list[float]] = {}  # of each implementation that reads weights there

    def price(self, operations: Sequence[Operation], values: RegionValues) -> None:
        """Set cost_ns of every candidate; drop candidates whose numbers are wrong."""
        start = time.perf_counter()
        self._find_those_from_memory(operations)
        for operation in operations:
            give_way()
            from_memory = operation in self._from_memory
            operation.candidates = self._equal_work.priced(operation, self._estimated, from_memory=from_memory)
        if self.mode in ("off", "near"):
            for operation in operations:
                operation.candidates = _without_rivals(operation.candidates)
            return
        self.turn.give_time(_CALLS * sum(map(_best_estimate_ns, operations)) / 1e9)
        order = self._most_promising_first(operations)
        estimated = [operation.candidates for operation in order]
        rounds = (self._near_the_best, self._prospects) if self.turn.is_limited else (self._prospects,)
        for choose in rounds:
            for number, (operation, candidates) in enumerate(zip(order, estimated, strict=True)):
                if self.progress is not None:
                    self.progress(number, len(order))
                give_way()
                self._price(operation, values, candidates, choose)
        self.let_go()
        if self.measured:
            log.info("measured %d candidates in %.1f s", self.measured, time.perf_counter() - start)
        if self.turn.left_out:
            log.info("not everything was measured: %s", self.turn.reason or "the time for it was over")

    def _key(self, candidate: Candidate) -> str:
        """Its fingerprint, which is asked for several times; with what says that its weights come from memory."""
        place = _place_in_memory(candidate)
        known = self._keys.get(place)
        if known is None:
            known = self._keys[place] = candidate, self._equal_work.fingerprint(candidate)
        return known[1]

    def _find_those_from_memory(self, operations: Sequence[Operation]) -> None:
        """Note the operations whose weights come from memory: their times have keys of their own.

        Where the times that ship with the package know an operation with its weights in a cache alone, those count.
        """
        bound = [
            (operation, rivals)
            for operation in operations
            if (rivals := measurable(operation.candidates))
            and is_bound_by_weights(operation, rivals[0])
            and weights_bytes(rivals[0]) >= LEAST_BYTES
        ]
        if not bound or not exceed_the_cache(operations):
            return
        for operation, rivals in bound:
            keys = {_place_in_memory(c): (c, self._key(c)) for c in rivals}
            from_memory = {place: (c, FROM_MEMORY + key) for place, (c, key) in keys.items()}
            ships = any(self.database.ships(key) for _, key in keys.values())
            if not ships or any(self.database.get(key) for _, key in from_memory.values()):
                self._from_memory.add(operation)
                self._keys |= from_memory

    def _estimated(self, operation: Operation) -> list[Candidate]:
        """Every candidate with its time on a machine like this one, or what was learned from such, or the table says,
        brought to such times.
        """
        candidates = [replace(c, cost_ns=estimate_ns(operation, c, self.threads)) for c in operation.candidates]
        if operation in self._from_memory:
            candidates = read_at_full_speed(candidates)
        rivals = measurable(candidates)
        if not rivals:
            return candidates
        if self._learned is not None:
            times_ns = completed([c.cost_ns for c in rivals], self._learned.estimates_ns(operation, rivals))
            priced = {id(c): replace(c, cost_ns=ns) for c, ns in zip(rivals, times_ns, strict=True)}
            candidates = [priced.get(id(c), c) for c in candidates]
            rivals = measurable(candidates)
        if not self.database.has_hints:
            return candidates
        hints = {id(c): self.database.hint_ns(self._key(c)) for c in rivals}
        ratios = [hint / max(1.0, c.cost_ns) for c in rivals if (hint := hints[id(c)]) is not None]
        if not ratios:
            return candidates
        scale = geometric_mean(ratios)
        scale = scale if self._learned is not None else max(1.0, scale)
        best_ns = min(hint for hint in hints.values() if hint is not None)

        def time_ns(c: Candidate) -> float:
            hint = hints.get(id(c))
            if hint is None:
                return best_ns if _saves_much(c) else scale * c.cost_ns
            return hint

        return [replace(c, cost_ns=time_ns(c)) for c in candidates]

    def _price(self, operation: Operation, values: RegionValues, candidates: list[Candidate], choose: Choose) -> None:
        if operation.kind != "concat":
            operation.candidates = self._measured(operation, values, candidates, choose)
            return
        others = [self._priced_concat(c) for c in candidates if not is_rival(c)]
        operation.candidates = others + self._measured(operation, values, [*filter(is_rival, candidates)], choose)

    def _measured(
        self, operation: Operation, values: RegionValues, candidates: list[Candidate], choose: Choose
    ) -> list[Candidate]:
        rivals = measurable(candidates)
        if not rivals:
            return candidates
        chosen = choose(operation, rivals)
        ordered = sorted(enumerate(chosen), key=lambda numbered: numbered[1].cost_ns)
        prospects = [(place, self._key(c), c) for place, c in ordered]
        measured = set(map(id, rivals))  # candidates that are nearly equal would be compared down to their weights
        others = [c for c in candidates if id(c) not in measured]
        if all(self.database.get(key) is not None for _, key, _ in prospects):
            return others + self._timed(operation, values, prospects)
        if not self.turn.allows(SHARE):
            return others + self._known_or_estimated(operation, rivals)
        with self.turn.measuring():
            return others + self._timed(operation, values, prospects)

    def _timed(
        self, operation: Operation, values: RegionValues, prospects: Sequence[tuple[int, str, Candidate]]
    ) -> list[Candidate]:
        """Those that are right with their times, in the order of their places; measured where they are not known.

        prospects  place, key and candidate, the most promising first
        """
        bench: Bench | None = None
        best_ns, right, fresh = math.inf, list[tuple[int, str, Candidate]](), dict[str, Candidate]()
        from_memory = operation in self._from_memory
        for place, key, candidate in prospects:
            result = self.database.get(key)
            if result is None:
                bench = bench or Bench(operation, values, self._scratch, from_memory=from_memory)
                result = self._run(bench, candidate, best_ns, key)
                fresh[key] = candidate
            if result.right:
                best_ns = min(best_ns, result.time_ns)
                right.append((place, key, replace(candidate, cost_ns=result.time_ns, from_memory=from_memory)))
                if from_memory:
                    ratios = self._ratios_from_memory.setdefault(product_of(candidate), [])
                    ratios.append(result.time_ns / max(1.0, candidate.cost_ns))
        again: dict[str, float] = {}
        if bench is not None:
            again = {} if self.turn.is_limited else self._look_again(bench, fresh, best_ns)
            bench.close()
        if not any(not is_rival(c) for *_, c in right):
            self.doubt(operation)
        right.sort(key=lambda found: found[0])  # whatever the estimates were: of equal times the first wins
        timed = [replace(c, cost_ns=again.get(key, c.cost_ns)) for _, key, c in right]
        if timed:
            self._ratios.append(min(c.cost_ns for c in timed) / max(1.0, prospects[0][2].cost_ns))
        return timed

    def _known_or_estimated(self, operation: Operation, rivals: list[Candidate]) -> list[Candidate]:
        """Those whose times are known; in other layouts estimates, brought to what was measured. None of PyTorch's,
        where there is another, unless it was measured with other weights from memory.
        """
        known, unknown = [], []
        for candidate in rivals:
            result = self.database.get(self._key(candidate))
            if result is None:
                unknown.append(candidate)
            elif result.right:
                known.append((candidate, result.time_ns))
        ratios = [time_ns / max(1.0, candidate.cost_ns) for candidate, time_ns in known] or self._ratios or [1.0]
        scale = geometric_mean(ratios)
        found = self._ratios_from_memory if operation in self._from_memory else {}
        scales = {name: geometric_mean(own) for name, own in found.items()}
        layouts = {(*candidate.srcs, candidate.dst) for candidate, _ in known}
        estimated = [
            c for c in unknown
            if (*c.srcs, c.dst) not in layouts and (not is_rival(c) or _saves_much(c) or product_of(c) in scales)
        ]  # fmt: skip
        if not known:
            estimated = estimated or unknown
        from_memory = operation in self._from_memory
        times = known + [(c, scales.get(product_of(c), scale) * c.cost_ns) for c in estimated]
        return [replace(c, cost_ns=time_ns, from_memory=from_memory) for c, time_ns in times]

    def _most_promising_first(self, operations: Sequence[Operation]) -> list[Operation]:
        """Those first that the most time goes to, equal work taken together: it is measured once."""
        total: dict[str, float] = {}
        work = []
        for operation in operations:
            rivals = measurable(operation.candidates)
            work.append(self._key(min(rivals, key=lambda c: c.cost_ns)) if rivals else "")
            total[work[-1]] = total.get(work[-1], 0.0) + _best_estimate_ns(operation)
        order = sorted(range(len(operations)), key=lambda i: -total[work[i]])
        return [operations[i] for i in order]

    def _near_the_best(self, operation: Operation, candidates: list[Candidate]) -> list[Candidate]:
        """The candidates to measure first: of the prospects, those estimated near the best in any layout."""
        prospects = self._prospects(operation, candidates)
        best_ns = min(c.cost_ns for c in prospects)
        return [c for c in prospects if c.cost_ns <= _PROSPECTS * best_ns]

    def _look_again(self, bench: Bench, fresh: Mapping[str, Candidate], best_ns: float) -> dict[str, float]:
        """Time those near the best once more, and keep the better time: a disturbance lasts longer than one of them."""
        times: dict[str, float] = {}
        for key, candidate in fresh.items():
            first = self.database.get(key)
            if first is not None and first.right and first.time_ns <= _NEAR_THE_BEST * best_ns:
                times[key] = min(first.time_ns, bench.time_again(candidate))
                self.database.put(key, replace(first, time_ns=times[key]))
        return times

    def _priced_concat(self, candidate: Candidate) -> Candidate:
        """A concatenation is its reorders, or costs nothing where its pieces are written in place."""
        if candidate.slices_bytes or not measurable([candidate]):
            return candidate
        pds = [template.pd for template in candidate.calls if isinstance(template, PrimitiveTemplate)]
        cost_ns = sum(self.reorder_ns(pd.src_desc, pd.dst_desc) for pd in pds if pd.src_desc and pd.dst_desc)
        return replace(candidate, cost_ns=cost_ns)

    def _prospects(self, operation: Operation, candidates: list[Candidate]) -> list[Candidate]:
        """The candidates worth measuring: per choice of layouts, those near the best of that choice.

        By arithmetic, and by times of other machines. Where times of this kind of machine are at hand, they are no
        reason to measure more: those of the prospects change what the rest is estimated at.
        """
        known = self._chosen.get(operation)
        if known is None:
            known = self._chosen[operation] = self._worth_measuring(operation, candidates)
        return known

    def _worth_measuring(self, operation: Operation, candidates: list[Candidate]) -> list[Candidate]:
        if self.mode == "full":
            return candidates
        near = _near_the_best_of_its_layouts(candidates, [c.cost_ns for c in candidates])
        if self.database.has_hints:
            arithmetic = [estimate_ns(operation, c, self.threads) for c in candidates]
            if self.database.has_shipped:
                near = {i for i, c in enumerate(candidates) if self.database.get(self._key(c)) is not None}
            near |= _near_the_best_of_its_layouts(candidates, arithmetic)
        return [c for i, c in enumerate(candidates) if i in near]

    def _run(self, bench: Bench, candidate: Candidate, best_ns: float, key: str) -> Result:
        try:
            result = bench.check_and_time(candidate, best_ns)
            for draw in range(1, bench.draws if result.right else 1):
                result = self._check_again(bench, candidate, draw, result)
        except ZenDNNError as error:
            log.debug("%s: %s: %s", bench.operation.name, candidate.implementation, error)
            result = Result(math.inf, math.nan, False)
        if not result.right:
            log.info(
                "%s: %s gives wrong numbers here (error %.1e) and is not used",
                bench.operation.name, candidate.implementation, result.error,
            )  # fmt: skip
            self._wrong.setdefault(bench.operation.name, []).append(key)
        self.measured += 1
        if bench.holds_for_others(result):
            self.database.put(key, result, is_verdict=True)
        return result

    def _check_again(self, bench: Bench, candidate: Candidate, draw: int, result: Result) -> Result:
        """The result, if the candidate is right on other operands, too."""
        other = Bench(bench.operation, bench.values, self._scratch, draw)
        found = other.check_and_time(candidate, CHECK_ONLY)
        other.close()
        return result if found.right else found

    def doubt(self, operation: Operation) -> None:
        """No implementation gave right numbers: rather the check is at fault than all of them. No file tells others."""
        self.database.keep_out(self._wrong.get(operation.name, ()))

    def are_comparable(self, chosen: Candidate, other: Candidate) -> bool:
        """Whether `other` is about as fast as `chosen` where their times say so; "full" is for the fastest."""
        if _saves_much(other):
            return self.mode != "full"
        return self.mode == "auto" and all(self.database.get(self._key(c)) is not None for c in (chosen, other))

    def let_go(self) -> None:
        """Give back the memory that measuring took."""
        self._scratch.clear()
        let_go_of_other_memory()

    def approve(self, operation: Operation, candidate: Candidate, values: RegionValues) -> bool:
        """Whether the candidate's numbers are right: known, or found out now."""
        if not measurable([candidate]):
            return True
        key = self._key(candidate)
        result = self.database.verdict(key)
        if result is None:  # not under the key itself: one untimed run is no measurement
            bench = Bench(operation, values, self._scratch)
            result = self._run(bench, candidate, CHECK_ONLY, CHECKED + key)
            bench.close()
        return result.right

    def reorder_ns(self, have: Layout, want: Layout) -> float:
        """The time of a reorder between two layouts: from one of the same formats and about the same size."""
        size_bytes = have.size_bytes + want.size_bytes
        key = reorder_fingerprint(have, want)
        if self.mode in ("off", "near"):
            # Between integers and float it decides which of two estimates counts, and these have the same overhead.
            is_conversion = isinstance(have, Quantized) or isinstance(want, Quantized)
            hint = None if is_conversion else self.database.hint_ns(key)
            return self._estimated_reorder_ns(have, want) if hint is None else hint * size_bytes
        result = self.database.get(key)
        if result is None and not self.turn.allows(SHARE):
            return self._estimated_reorder_ns(have, want)
        if result is None:
            with self.turn.measuring():
                result = Result(kept_ns(time_reorder(have, want) / size_bytes), 0.0, True)
                self.measured += 1
                self.database.put(key, result)
        return result.time_ns * size_bytes

    def _estimated_reorder_ns(self, have: Layout, want: Layout) -> float:
        known_ns = None if self._learned is None else self._learned.reorder_ns(have, want)
        return reorder_ns(have, want) if known_ns is None else known_ns


def _place_in_memory(candidate: Candidate) -> tuple[int, ...]:
    """Equal for candidates that differ in costs alone."""
    return id(candidate.calls), id(candidate.srcs), id(candidate.dst)


def _near_the_best_of_its_layouts(candidates: Sequence[Candidate], costs_ns: Sequence[float]) -> set[int]:
    """The positions of those that cost little more than the best between the same layouts."""
    places = [(*c.srcs, c.dst) for c in candidates]
    best: dict[tuple[Layout, ...], float] = {}
    for place, cost_ns in zip(places, costs_ns, strict=True):
        best[place] = min(best.get(place, math.inf), cost_ns)
    return {i for i, place in enumerate(places) if costs_ns[i] <= _PROSPECTS * best[place]}


def _without_rivals(candidates: list[Candidate]) -> list[Candidate]:
    """What is chosen from by estimate: what PyTorch computes where nothing else does, or reads weights faster."""
    return [c for c in candidates if not is_rival(c) or _saves_much(c) or c.from_memory] or candidates


def _saves_much(candidate: Candidate) -> bool:
    """Whether PyTorch reads large weights where they lie, at the speed of memory, of which others want a copy."""
    return candidate.implementation == MATRIX_VECTOR and weights_bytes(candidate) >= _LARGE_BYTES


def _best_estimate_ns(operation: Operation) -> float:
    return min((c.cost_ns for c in operation.candidates), default=0.0)
