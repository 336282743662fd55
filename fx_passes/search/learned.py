"""Estimates learned from the times that ship with the package: a file for a kind of CPU and a number of threads.

    {"machine": ..., "threads": ..., "sorts": {sort of operation: time lost by the table, and by this},
     "kernels": {kernel: [lowest, highest, weights]}, "reorders": {formats: [lowest, highest, logarithm, slope]}}

Of each kernel (fx_passes.search.features) the binary logarithm of its time is a sum of its sizes' logarithms and their
products, each with a weight. Within the sizes that were measured that is an interpolation. Below them the least size
counts, so nothing gets better by being smaller than all that is known. Beyond them a little more than the work counts.
`make learned-estimates` fits the weights again, and says how well they predict networks that they were not fitted to.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fx_passes.candidates.candidates import Candidate, Operation, PrimitiveTemplate
from fx_passes.candidates.layouts import Layout, Quantized
from fx_passes.search import shipped
from fx_passes.search.features import Facts, facts_of

log = logging.getLogger("zendnn_cffi.search")

FORMAT = 1  # part of the file's name: raise it when features or their order change
_BEYOND = 1.25  # twice the work beyond what was measured takes so many doublings: the share of the peak is unknown
_CACHE_BYTES, _BYTES_PER_NS = 32 << 20, 45.0  # further bytes come from memory, if they are many


class Kernel(NamedTuple):
    """What was learned of one kernel.

    low, high  the sizes that were measured: work, then others
    weights    of 1, of the sizes, and of the products of two factors of the work
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    weights: tuple[float, ...]


class Learned:
    """The estimates of one file."""

    def __init__(
        self,
        about: Mapping[str, Any],
        kernels: Mapping[str, Kernel],
        reorders: Mapping[str, tuple[float, ...]],
        sorts: Mapping[str, tuple[float, ...]],
    ) -> None:
        self.about, self._kernels, self._reorders, self.sorts = about, kernels, reorders, sorts

    def __len__(self) -> int:
        return len(self._kernels)

    def estimates_ns(self, operation: Operation, candidates: Sequence[Candidate]) -> list[float | None]:
        """The times of an operation's candidates; None of all where the table predicts its sort as well."""
        return [self.estimate_ns(c) if sort_of(operation, c) in self.sorts else None for c in candidates]

    def estimate_ns(self, candidate: Candidate) -> float | None:
        """The time of a candidate's calls; None where one of them is no primitive, or a kernel that is not known."""
        total_ns = 0.0
        for template in candidate.calls:
            facts = facts_of(template) if isinstance(template, PrimitiveTemplate) else None
            if facts is None or (time_ns := self.time_ns(facts)) is None:
                return None
            total_ns += time_ns
        return total_ns if candidate.calls else None

    def time_ns(self, facts: Facts) -> float | None:
        """The time of one primitive; None where its kernel is not known."""
        kernel = self._kernels.get(facts.kernel)
        if kernel is None:
            return None
        sizes, beyond = terms(facts, kernel.low, kernel.high)
        logarithm = sum(map(float.__mul__, sizes, kernel.weights)) + _BEYOND * beyond
        return float(2.0**logarithm) + max(0, facts.size_bytes - _CACHE_BYTES) / _BYTES_PER_NS

    def reorder_ns(self, have: Layout, want: Layout) -> float | None:
        """The time of a reorder; None where the pair of formats is not known."""
        size_bytes = have.size_bytes + want.size_bytes
        if isinstance(have, Quantized) or isinstance(want, Quantized) or size_bytes == 0:
            return None
        known = self._reorders.get(pair(have, want))
        if known is None:
            return None
        low, high, at_low, slope = known
        return float(size_bytes * 2.0 ** (at_low + slope * (min(max(math.log2(size_bytes), low), high) - low)))


def sort_of(operation: Operation, candidate: Candidate) -> str:
    """What it is decided for whether estimates are learned: the kind of operation, and the type that it reads."""
    return f"{operation.kind} {str((candidate.srcs or (candidate.dst,))[0].dtype).removeprefix('torch.')}"


def terms(facts: Facts, low: Sequence[float], high: Sequence[float]) -> tuple[list[float], float]:
    """What weights are for, within the sizes that were measured; and the doublings of work beyond these."""
    sizes = [
        min(max(size, least), most) for size, least, most in zip((*facts.work, *facts.others), low, high, strict=True)
    ]
    work = sizes[: len(facts.work)]
    beyond = sum(max(0.0, size - most) for size, most in zip(facts.work, high, strict=False))
    return [1.0, *sizes, *(a * b for i, a in enumerate(work) for b in work[i:])], beyond


def pair(have: Layout, want: Layout) -> str:
    """A key for reorders between two formats."""
    return f"{have.dtype} {have.format} {want.dtype} {want.format}"


def path_of(name: str, threads: int) -> Path:
    """The file of a kind of CPU, as `shipped.machine()` names it."""
    return shipped.FOLDER / f"{name}-{threads}-{FORMAT}.estimates.json"


def write(
    path: Path,
    about: Mapping[str, Any],
    kernels: Mapping[str, Kernel],
    reorders: Mapping[str, Sequence[float]],
    sorts: Mapping[str, Sequence[float]],
) -> None:
    """Write a file: the same bytes for the same estimates, a line for each kernel."""
    head = [f"{json.dumps(key)}: {json.dumps(about[key], sort_keys=True)}" for key in sorted(about)]
    tables = {"sorts": sorts, "kernels": kernels, "reorders": reorders}
    body = [
        f'"{name}": {{\n'
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table))
        + "\n}"
        for name, table in tables.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{" + ",\n".join(head + body) + "}\n", encoding="utf-8")
    read.cache_clear()


@lru_cache(maxsize=16)
def read(path: Path) -> Learned | None:
    """Read a file; None where there is none, or none that is whole."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kernels = {str(name): _kernel(*given) for name, given in content.pop("kernels").items()}
        reorders = {str(name): _numbers(given, 4) for name, given in content.pop("reorders").items()}
        sorts = {str(name): _numbers(given, 2) for name, given in content.pop("sorts").items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s cannot be read: %s", path, error)
        return None
    return Learned(content, kernels, reorders, sorts)


def _kernel(low: Sequence[float], high: Sequence[float], weights: Sequence[float]) -> Kernel:
    count = len(low)
    allowed = {1 + count + work * (work + 1) // 2 for work in range(1, count + 1)}
    if len(weights) not in allowed:
        raise ValueError(f"{len(weights)} weights of {count} sizes")
    return Kernel(_numbers(low, count), _numbers(high, count), _numbers(weights, len(weights)))


def _numbers(given: Sequence[float], count: int) -> tuple[float, ...]:
    numbers = tuple(map(float, given))
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{given} are not {count} numbers")
    return numbers


def learned_for(threads: int) -> Learned | None:
    """The estimates of this kind of CPU, of the number of threads nearest to this one; None where there are none."""
    paths = shipped.nearest_first(f"{shipped.machine()}-*-{FORMAT}.estimates.json", threads)
    return next((found for path in paths if (found := read(path)) is not None), None)
