"""Knapsack: no other choice gains more within the budget, nor costs less for its gain."""

from __future__ import annotations

import itertools
import random

import pytest

from zendnn_cffi.api.quantization.knapsack import Knapsack


def items(seed: int, count: int) -> tuple[list[float], list[float]]:
    draw = random.Random(seed)
    return [draw.random() for _ in range(count)], [10 ** draw.uniform(-6, -1) for _ in range(count)]


@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_best_of_all_choices(seed: int) -> None:
    gains, costs = items(seed, 9)
    knapsack = Knapsack(gains, costs)
    for share in (0.0, 0.01, 0.2, 0.7, 1.0):
        budget = share * sum(costs) * 1.000001
        found = knapsack.best(budget)
        choices = [c for n in range(10) for c in itertools.combinations(range(9), n)]
        most = max(sum(gains[i] for i in c) for c in choices if sum(costs[i] for i in c) <= budget)
        assert sum(costs[i] for i in found) <= budget
        assert sum(gains[i] for i in found) == pytest.approx(most, abs=9 * sum(gains) / 20_000)


def test_the_frontier_falls_from_all_to_none() -> None:
    gains, costs = items(1, 60)
    frontier = Knapsack(gains, costs).frontier(12)
    assert frontier[0] == list(range(60)) and frontier[-1] == [] and len(frontier) == 12
    for better, worse in itertools.pairwise(frontier):
        assert sum(gains[i] for i in better) > sum(gains[i] for i in worse)
        assert sum(costs[i] for i in better) > sum(costs[i] for i in worse)


def test_items_of_no_gain_are_taken_where_there_is_room() -> None:
    assert Knapsack([1.0, 0.0], [1.0, 1.0]).best(2.0) == [0, 1]
    assert Knapsack([1.0, 0.0], [1.0, 1.0]).best(1.5) == [0]
    assert Knapsack([0.0, 0.0], [3.0, 1.0]).best(1.5) == [1]


def test_nothing_fits() -> None:
    assert Knapsack([1.0], [1.0]).best(0.5) == [] and Knapsack([], []).best(1.0) == []
    assert Knapsack([1.0], [1.0]).best(-1.0) == [] and Knapsack([], []).frontier(3) == [[]]
