"""What is asked of one layer's candidates holds for all layers of equal shapes: these share primitive descriptors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from fx_passes.candidates.candidates import Candidate, Operation, PrimitiveTemplate, weights_bytes
from fx_passes.candidates.layouts import Quantized
from fx_passes.search.measure import fingerprint


class EqualWork:
    """Fingerprints and estimated times, made once for all candidates and operations of equal work.

    Work is told by the identity of primitive descriptors. What is remembered holds them, so that no other takes their
    place in memory.
    """

    def __init__(self) -> None:
        self._fingerprints: dict[Hashable, tuple[Candidate, str]] = {}
        self._priced: dict[Hashable, list[Candidate]] = {}

    def fingerprint(self, candidate: Candidate) -> str:
        """As measure.fingerprint()."""
        work = _work_of(candidate)
        if work is None:
            return fingerprint(candidate)
        known = self._fingerprints.get(work)
        if known is None:
            known = self._fingerprints[work] = candidate, fingerprint(candidate)
        return known[1]

    def priced(
        self, operation: Operation, estimate: Callable[[Operation], list[Candidate]], *, from_memory: bool
    ) -> list[Candidate]:
        """As estimate(operation): its candidates in their order, with times.

        estimate     goes by the kind of the operation, its arithmetic and its candidates, and by from_memory
        from_memory  whether the operation's weights are in no cache
        """
        works = [_work_of(candidate) for candidate in operation.candidates]
        if None in works:
            return estimate(operation)
        key = operation.kind, operation.flops, from_memory, *works
        known = self._priced.get(key)
        if known is None:
            known = self._priced[key] = estimate(operation)
            return known
        return _with_times_of(known, operation.candidates)


def _with_times_of(priced: Sequence[Candidate], candidates: Sequence[Candidate]) -> list[Candidate]:
    return [replace(c, cost_ns=other.cost_ns) for c, other in zip(candidates, priced, strict=True)]


def _work_of(candidate: Candidate) -> Hashable | None:
    """Equal for candidates whose calls do equal work between equal layouts; None where that is not known."""
    if candidate.slices_bytes or not candidate.calls:
        return None
    if any(isinstance(desc, Quantized) for desc in (*candidate.srcs, candidate.dst)):
        return None  # their scales are in no descriptor
    if not all(isinstance(template, PrimitiveTemplate) for template in candidate.calls):
        return None
    primitives = [(t.kind, id(t.pd)) for t in candidate.calls if isinstance(t, PrimitiveTemplate)]
    return candidate.implementation, candidate.srcs, candidate.dst, weights_bytes(candidate), *primitives
