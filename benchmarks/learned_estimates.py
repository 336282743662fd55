"""Learn estimates from the times that ship with the package: `make learned-estimates`.

    python benchmarks/learned_estimates.py                       of every kind of CPU and number of threads on record
    python benchmarks/learned_estimates.py --check               only say how well they predict networks left out

The networks on record are lowered once more, without measuring, to find what their digests stand for: each candidate's
features lie in benchmarks/out/learned-estimates. Weights are fitted kernel by kernel: ridge regression towards "twice
the work, twice the time", with Huber's weights against disturbed times. Nothing of it is needed at run time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

if __name__ == "__main__":  # the checkout comes last, so that an installed zendnn_cffi wins over the source tree
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parent.parent)]

from benchmarks.case import Case
from fx_passes.search import cost, learned, shipped
from fx_passes.search.features import Facts, facts_of
from fx_passes.search.learned import Kernel, Learned, sort_of

FOLDER = Path(__file__).resolve().parent / "out" / "learned-estimates"
_FEWEST = 8  # different sizes of a kernel: fewer say nothing of others
_RIDGE = 1.0
_ROUNDS = 6  # of weighting
_CLEARLY = 0.95  # of the time that the table loses
_HOPELESS, _FIRST_NS = 2.0, 9e6  # as fx_passes.search.measure, whose best was another one just then
_DTYPES, _MAGNITUDES = ("torch.float32", "torch.bfloat16"), range(8, 32)
_FORMATS = ("nhwc", "nChw16c", "nchw", "ab", "ba", "abc", "ncw", "nwc", "nCw16c", "a", "abcd", "acbd")

Logarithms = Mapping[Facts, list[float]]


@dataclass(frozen=True)
class Row:
    """A candidate of an operation of a network.

    operation  its number
    layouts    what it reads and writes
    facts      of each call; None where nothing is said of one
    table_ns   by fx_passes.search.cost
    sort       of operation, as learned.sort_of names it
    """

    operation: int
    layouts: str
    fingerprint: str
    implementation: str
    facts: tuple[Facts, ...] | None
    table_ns: float
    is_rival: bool
    sort: str


def case_of(text: str) -> Case:
    """The case that a file of times names."""
    found = re.fullmatch(r"(\S+) (\S+) b(\d+)(?: (\d+) threads?)?", text)
    assert found is not None, text
    return Case(found[1], int(found[3]), found[2], int(found[4] or 2))


def rows_of(case: Case) -> list[Row]:
    """The candidates of a case, from a file or by lowering."""
    path = FOLDER / f"{case}.json"
    if not path.is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_lowered(case)))
    return [_row(*given) for given in json.loads(path.read_text())]


def _row(
    operation: int, layouts: str, key: str, implementation: str, facts: Any, table_ns: float, is_rival: bool, sort: str
) -> Row:
    known = None if facts is None else tuple(map(_facts, facts))
    return Row(operation, layouts, key, implementation, known, table_ns, is_rival, sort)


def _facts(given: Sequence[Any]) -> Facts:
    kernel, work, others, size_bytes = given
    return Facts(kernel, tuple(work), tuple(others), size_bytes)


class _Lowered(BaseException):
    """The candidates are known: the lowering ends. Regions handle exceptions, not this."""


def _lowered(case: Case) -> list[tuple[Any, ...]]:
    import torch

    import zendnn_cffi
    from benchmarks import workloads
    from fx_passes.candidates.candidates import PrimitiveTemplate, measurable
    from fx_passes.search.measure import fingerprint, is_rival
    from fx_passes.search.tuner import Tuner

    found: list[tuple[Any, ...]] = []

    def price(tuner: Tuner, operations: Sequence[Any], values: Any) -> None:
        for number, operation in enumerate(operations):
            for c in measurable(operation.candidates):
                facts = [facts_of(t) if isinstance(t, PrimitiveTemplate) else None for t in c.calls]
                layouts = str([f"{src.dims} {src.dtype} {src.format}" for src in (*c.srcs, c.dst)])
                table_ns = cost.estimate_ns(operation, c, case.threads)
                known = None if None in facts else facts
                found.append(
                    (
                        number,
                        layouts,
                        fingerprint(c),
                        c.implementation,
                        known,
                        table_ns,
                        is_rival(c),
                        sort_of(operation, c),
                    )
                )
        raise _Lowered

    row = workloads.find(case.workload)
    inputs = row.inputs(case.batch)
    dtype = torch.bfloat16 if case.dtype == "bf16" else None
    model: Any = zendnn_cffi.optimize(row.build(calibrate=False), inputs, dtype=dtype, tune_seconds=0)
    with mock.patch.object(Tuner, "price", price), torch.inference_mode(), contextlib.suppress(_Lowered):
        model(*inputs)
    return found


@dataclass(frozen=True)
class Network:
    """Candidates whose times are on record, right ones, by operation.

    hopeless  fingerprints of those so slow in their first run that it was the only one: it makes code, touches memory,
              and what disturbs it stays
    """

    operations: tuple[tuple[tuple[Row, float], ...], ...]
    hopeless: frozenset[str]


def network_of(rows: Sequence[Row], times: shipped.Shipped) -> Network:
    """What is on record of a network."""
    operations: dict[int, list[tuple[Row, float]]] = defaultdict(list)
    for row in rows:
        if (result := times.get(row.fingerprint)) is not None and result.right:
            operations[row.operation].append((row, result.time_ns))
    least = {number: min(time_ns for _, time_ns in known) for number, known in operations.items()}
    hopeless = {
        row.fingerprint
        for number, known in operations.items()
        for row, time_ns in known
        if time_ns > _HOPELESS * least[number] + _FIRST_NS
    }
    return Network(tuple(map(tuple, operations.values())), frozenset(hopeless))


def times_of(networks: Iterable[Network]) -> Logarithms:
    """Logarithms of the times on record, of candidates of one call, by what is said of them."""
    seen: set[str] = set()
    found: dict[Facts, list[float]] = defaultdict(list)
    for network in networks:
        seen |= network.hopeless
        for row, time_ns in (pair for operation in network.operations for pair in operation):
            if row.fingerprint not in seen and row.facts is not None and len(row.facts) == 1:
                seen.add(row.fingerprint)
                found[row.facts[0]].append(math.log2(time_ns))
    return found


def fit(times: Logarithms) -> dict[str, Kernel]:
    """Weights for each kernel with enough sizes."""
    kernels: dict[str, dict[Facts, float]] = defaultdict(dict)
    for facts, logarithms in times.items():
        kernels[facts.kernel][facts] = float(np.median(logarithms))
    return {name: _fit_kernel(known) for name, known in kernels.items() if len(known) >= _FEWEST}


def _fit_kernel(known: Mapping[Facts, float]) -> Kernel:
    sizes = np.array([[*facts.work, *facts.others] for facts in known])
    low, high = sizes.min(0), sizes.max(0)
    terms = np.array([learned.terms(facts, low, high)[0] for facts in known])
    prior = np.zeros(terms.shape[1])
    prior[1 : 1 + len(next(iter(known)).work)] = 1.0  # twice the work, twice the time
    left = np.array([*known.values()]) - terms @ prior
    middle, spread = terms.mean(0), np.maximum(terms.std(0), 0.3)
    middle[0], spread[0] = 0.0, 1.0
    scaled = (terms - middle) / spread
    ridge = _RIDGE * np.eye(len(prior))
    ridge[0, 0] = 1e-6
    trust = np.ones(len(left))
    for _ in range(_ROUNDS):
        weights = np.linalg.solve(scaled.T @ (trust[:, None] * scaled) + ridge, scaled.T @ (trust * left))
        errors = np.abs(left - scaled @ weights)
        trust = np.minimum(1.0, max(1.5 * float(np.median(errors)), 0.05) / np.maximum(errors, 1e-9))
    plain = weights / spread
    plain[0] = weights[0] - float((weights[1:] * middle[1:] / spread[1:]).sum())
    return Kernel(_rounded(low), _rounded(high), _rounded(plain + prior))


def _rounded(numbers: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(float(number), 5) for number in numbers)


def fit_reorders(times: shipped.Shipped) -> dict[str, tuple[float, ...]]:
    """Of each pair of formats on record a line: the logarithm of the time per byte by that of the bytes."""
    found = {}
    formats = [f"{dtype} {name}" for dtype in _DTYPES for name in _FORMATS]
    for pair in (f"{have} {want}" for have in formats for want in formats):
        known = {
            magnitude - 0.5: math.log2(result.time_ns)
            for magnitude in _MAGNITUDES
            if (result := times.get(f"reorder {pair} 2^{magnitude} bytes")) is not None
        }
        if known:
            low, high = min(known), max(known)
            slope, start = (
                map(float, np.polyfit([*known], [*known.values()], 1))
                if len(known) > 2
                else (0.0, statistics.fmean(known.values()))
            )
            found[pair] = _rounded((low, high, slope * low + start, slope))
    return found


Sums = dict[str, tuple[float, float]]  # by sort of operation: the best times in all, and those of what was chosen
Estimate = Callable[[Sequence[Row]], list[float]]


def sums(network: Network, estimate: Estimate) -> Sums:
    """Times of a network's operations: of the best implementations, and of those with the least estimate.

    What was hopeless counts as twice the best. What PyTorch computes is not chosen by estimate.
    """
    found: Sums = {}
    for known in network.operations:
        own = [(row, time_ns) for row, time_ns in known if not row.is_rival]
        if not own:
            continue
        best_ns = min(time_ns for _, time_ns in own)
        estimates = estimate([row for row, _ in own])
        row, chosen_ns = own[min(range(len(own)), key=estimates.__getitem__)]
        if row.fingerprint in network.hopeless:
            chosen_ns = min(chosen_ns, 2 * best_ns)
        sort = own[0][0].sort
        found[sort] = added(found.get(sort, (0.0, 0.0)), (best_ns, chosen_ns))
    return found


def added(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """Both sums."""
    return a[0] + b[0], a[1] + b[1]


def reached(found: Sums) -> float:
    """Share of the best implementations' speed."""
    best_ns, chosen_ns = functools.reduce(added, found.values(), (0.0, 0.0))
    return best_ns / chosen_ns if chosen_ns else math.nan


def mean(shares: Iterable[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, shares)))


def by_table(rows: Sequence[Row]) -> list[float]:
    """What fx_passes.search.cost says."""
    return [row.table_ns for row in rows]


def by(estimates: Learned) -> Estimate:
    """What was learned says, and the table of the rest."""

    def estimate(rows: Sequence[Row]) -> list[float]:
        known = [None if row.facts is None else _sum(map(estimates.time_ns, row.facts)) for row in rows]
        return cost.completed([row.table_ns for row in rows], known)

    return estimate


def _sum(times_ns: Iterable[float | None]) -> float | None:
    total = 0.0
    for time_ns in times_ns:
        if time_ns is None:
            return None
        total += time_ns
    return total


def learn(path: Path, *, check_only: bool) -> None:
    """Fit the weights of a file of times, and say how well those predict which do not know a network.

    Sorts of operations that do not clearly lose less time so, over all networks left out, are left to the table.
    """
    times = shipped.read(path)
    assert times is not None, path
    names = sorted(times.about["networks"], key=lambda name: (case_of(name).dtype, name), reverse=True)
    networks = {name: network_of(rows_of(case_of(name)), times) for name in names}
    print(f"{path.name}: share of the best implementations' speed that the least estimate reaches", flush=True)
    table, own = dict[str, Sums](), dict[str, Sums]()
    for name in names:
        others = [other for key, other in networks.items() if case_of(key).workload != case_of(name).workload]
        blind = Learned({}, fit(times_of(others)), {}, {})
        table[name], own[name] = (sums(networks[name], estimate) for estimate in (by_table, by(blind)))
    shares = _better_sorts(table, own)
    print(f"{'left out':34} {'table':>6} {'learned':>8}   where better")
    pairs = []
    for name in names:
        mixed = {sort: (own if sort in shares else table)[name][sort] for sort in table[name]}
        pairs.append((reached(table[name]), reached(mixed)))
        print(f"{name:34} {pairs[-1][0]:6.3f} {pairs[-1][1]:8.3f}")
    for label, of in (("geometric mean", mean), ("least", min)):
        print(f"{label:34} {of(a for a, _ in pairs):6.3f} {of(b for _, b in pairs):8.3f}")
    if check_only:
        return
    kernels, reorders = fit(times_of(networks.values())), fit_reorders(times)
    machine, threads = times.about["machine"], times.about["threads"]
    to = learned.path_of(machine, threads)
    about = {"machine": machine, "cpu": times.about["cpu"], "threads": threads, "networks": names}
    learned.write(to, about, kernels, reorders, shares)
    print(f"{to.name}: {len(kernels)} kernels, {len(reorders)} reorders, {to.stat().st_size / 1e3:.0f} kB", flush=True)


def _better_sorts(table: Mapping[str, Sums], own: Mapping[str, Sums]) -> dict[str, tuple[float, ...]]:
    """The sorts of operations that lose less by what was learned, with both losses: shares of the networks' times."""
    found = {}
    for sort in sorted({sort for known in table.values() for sort in known}):
        losses = [0.0, 0.0]
        for name in (name for name, known in table.items() if sort in known):
            best_ns = sum(best for best, _ in table[name].values())
            for side, known in enumerate((table, own)):
                best, chosen = known[name][sort]
                losses[side] += (chosen - best) / best_ns / len(table)
        pair = _rounded(losses)
        print(f"{sort:34} {pair[0]:6.3f} {pair[1]:8.3f}   time lost, of that of the best")
        if pair[1] < _CLEARLY * pair[0]:
            found[sort] = pair
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Learn from every file of times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--only", default="", metavar="TEXT", help="files of times whose name has it")
    options = parser.parse_args(arguments)
    os.environ["ZENDNN_CFFI_CACHE"] = ""
    for path in sorted(shipped.FOLDER.glob(f"*{options.only}*.times")):
        learn(path, check_only=options.check)


if __name__ == "__main__":
    main()
