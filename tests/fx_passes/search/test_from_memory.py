"""Products whose weights are in no cache when a call comes are timed so, and under keys of their own."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.candidates import Operation
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.lower.products.matrix_vector import NAME as MATRIX_VECTOR
from fx_passes.lower.rules import lower_graph
from fx_passes.search import from_memory, measure
from fx_passes.search.database import Database, Result
from fx_passes.search.from_memory import KEY, LEAST_BYTES, exceed_the_cache, is_bound_by_weights
from fx_passes.search.measure import fingerprint, is_rival
from fx_passes.search.tuner import Tuner
from fx_passes.search.turn import Turn
from tests.support.lowering import noise

WIDTH = 576  # of square weights: more than LEAST_BYTES


def lowered(rows: int, layers: int = 3, width: int = WIDTH) -> tuple[list[Operation], RegionValues]:
    """Linear layers, one after the other."""
    assert width * width * 4 > LEAST_BYTES or width < WIDTH
    graph = fx.Graph()
    value = graph.placeholder("x")
    weights = {f"w{i}": noise(width, width) for i in range(layers)}
    for name in weights:
        value = graph.call_function(ops.linear, (value, graph.get_attr(name), None), {"post_ops": ()})
    graph.output(value)
    return lower_graph(graph, [TensorSpec.of(torch.empty(rows, width))], weights)


def small_cache(monkeypatch: pytest.MonkeyPatch, size_bytes: int = 2 << 20) -> None:
    monkeypatch.setattr(from_memory, "last_cache_bytes", lambda: size_bytes)
    from_memory.let_go()


@pytest.mark.parametrize(("rows", "bound"), [(1, True), (7, True), (9, False), (64, False)])
def test_few_rows_are_bound_by_their_weights(rows: int, bound: bool) -> None:
    operations, _ = lowered(rows, layers=1)
    assert is_bound_by_weights(operations[0], operations[0].candidates[0]) is bound


@pytest.mark.needs("avx512")
def test_weights_of_all_layers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    one_bytes = WIDTH * WIDTH * 4
    small_cache(monkeypatch, 2 * one_bytes)
    assert not exceed_the_cache(lowered(1, layers=2)[0])
    assert exceed_the_cache(lowered(1, layers=3)[0])
    assert not exceed_the_cache([])


@pytest.mark.needs("avx512")
@pytest.mark.parametrize(
    ("rows", "width", "cache_bytes", "cold"),
    [(1, WIDTH, 2 << 20, True), (1, WIDTH, 64 << 20, False), (64, WIDTH, 2 << 20, False), (1, 64, 1 << 10, False)],
    ids=["from memory", "fits the cache", "many rows", "small weights"],
)
def test_times_from_memory_have_keys_of_their_own(
    rows: int, width: int, cache_bytes: int, cold: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cache(monkeypatch, cache_bytes)
    emptied: list[int] = []
    monkeypatch.setattr(measure, "empty_caches", lambda: emptied.append(1))
    operations, values = lowered(rows, width=width)
    database = Database("machine", tmp_path)
    tuner = Tuner("full", turn=Turn(database, torch.get_num_threads()))
    tuner.price(operations, values)
    keys = {key for key in database.measured() if not key.startswith("reorder")}
    assert keys and all(key.startswith(KEY) is cold for key in keys)
    assert bool(emptied) is cold
    for operation in operations:
        assert all(c.from_memory is cold for c in operation.candidates)
        if cold:
            assert all(c.expected_ns == c.cost_ns for c in operation.candidates)


def test_the_first_run_does_not_count_where_caches_are_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    times, order = [70.0, 50.0, 60.0, 65.0, 55.0], list[str]()
    left = list(times)
    monkeypatch.setattr(measure, "run_ns", lambda program: order.append("run") or left.pop(0))
    fastest = measure.fastest_ns(None, 10.0, before=lambda: order.append("empty"))  # type: ignore[arg-type]
    assert fastest == min(times[: len(times) - len(left)]) and order[:4] == ["empty", "run"] * 2
    assert order.count("empty") == order.count("run")


def test_other_memory_is_read_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    small_cache(monkeypatch, 1 << 20)
    with torch.inference_mode():
        from_memory.empty_caches()
    memory = from_memory._other_memory()
    assert memory.nbytes > 1 << 20 and bool((memory != 0).all()) and not memory.is_inference()
    assert from_memory._other_memory() is memory
    from_memory.let_go()
    assert from_memory._other_memory() is not memory
    from_memory.let_go()


@pytest.mark.needs("avx512")
def test_by_estimate_the_batched_product_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cache_bytes, chosen in ((2 << 20, True), (64 << 20, False)):
        small_cache(monkeypatch, cache_bytes)
        operations, values = lowered(1)
        Tuner("off", turn=Turn(Database("machine", tmp_path), torch.get_num_threads())).price(operations, values)
        for operation in operations:
            best = min(operation.candidates, key=lambda c: c.expected_ns)
            assert (best.implementation == MATRIX_VECTOR) is chosen
            assert any(is_rival(c) for c in operation.candidates) is chosen


@pytest.mark.needs("avx512")
def test_what_is_not_measured_is_estimated_by_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of another width, for which no time was left, take the kernel that read others fastest."""
    small_cache(monkeypatch)
    operations, values = lowered(1)
    database = Database("machine", tmp_path)
    tuner = Tuner("auto", turn=Turn(database, torch.get_num_threads()))
    tuner._find_those_from_memory(operations)
    first, other = operations[0], operations[1]
    for operation in (first, other):
        operation.candidates = [replace(c, cost_ns=1000.0) for c in operation.candidates]
    for candidate in first.candidates:
        fast = candidate.implementation == MATRIX_VECTOR
        database.put(tuner._key(candidate), Result(400.0 if fast else 900.0, 0.0, True))
    tuner._measured(first, values, first.candidates, lambda operation, candidates: candidates)
    monkeypatch.setattr(database, "get", lambda key: None)
    estimated = tuner._known_or_estimated(other, other.candidates)
    best = min(estimated, key=lambda c: c.expected_ns)
    assert best.implementation == MATRIX_VECTOR and math.isclose(best.cost_ns, 400.0)
    assert all(math.isclose(c.cost_ns, 900.0) for c in estimated if c is not best)


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("both", (False, True), ids=["in a cache alone", "from memory, too"])
def test_shipped_times_in_a_cache_count_where_there_are_no_others(
    both: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cache(monkeypatch)
    operations, values = lowered(1)

    class Given(dict[str, Result]):
        pass

    names = [fingerprint(c) for c in operations[0].candidates]
    given = Given({name: Result(1000.0 + i, 0.0, True) for i, name in enumerate(names)})
    if both:
        given |= {KEY + name: Result(5000.0 - i, 0.0, True) for i, name in enumerate(names)}
    database = Database("machine", tmp_path, given)
    tuner = Tuner("auto", turn=Turn(database, torch.get_num_threads(), 0.0))
    tuner.price(operations, values)
    assert all(c.from_memory is both for c in operations[0].candidates)
    fastest = min(operations[0].candidates, key=lambda c: c.cost_ns)
    assert fingerprint(fastest) == (names[-1] if both else names[0])
