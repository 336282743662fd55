"""Choose one candidate per operation so that kernels and the reorders between them cost least.

Each operation is a variable, its states the candidates worth keeping (the cheapest for every combination of layouts).
A state costs its kernel; a pair of states of a producer and a reader costs the reorder between their layouts. The least
sum is found by variable elimination: take the variable with the smallest joint table, add up the tables that mention
it, minimise it out, remember the minimiser, go on; then read the choices backwards. That is exact, and cheap on chains
and residual graphs, whose joint tables span two or three variables. Where a joint table would grow past a bound
(densely connected blocks), the rest is settled by coordinate descent from the best uniform start.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import fx

from fx_passes.lower.candidates import Candidate, Operation
from fx_passes.lower.layouts import same_bytes
from zendnn_cffi.memory import MemoryDesc

MAX_TABLE = 1 << 20
Table = tuple[tuple[int, ...], np.ndarray]
ReorderCost = Callable[[MemoryDesc, MemoryDesc], float]


def assign_layouts(
    operations: Sequence[Operation],
    inputs: Mapping[fx.Node, MemoryDesc],
    outputs: Mapping[fx.Node, MemoryDesc],
    reorder_ns: ReorderCost,
) -> list[Candidate]:
    """Return the chosen candidate of each operation.

    inputs      layout in which each region input arrives
    outputs     layout in which each region output must leave
    reorder_ns  cost of a reorder between two layouts that are not the same bytes
    """
    states = [_worth_keeping(operation.candidates) for operation in operations]
    index = {operation.node: i for i, operation in enumerate(operations)}

    def cost(have: MemoryDesc, want: MemoryDesc) -> float:
        return 0.0 if same_bytes(have, want) else reorder_ns(have, want)

    tables: list[Table] = []
    for i, operation in enumerate(operations):
        unary = np.array([c.cost_ns for c in states[i]])
        wanted = outputs.get(operation.node)
        if wanted is not None:
            unary = unary + [cost(c.dst, wanted) for c in states[i]]
        for position, operand in enumerate(operation.operands):
            if operand in inputs:
                unary = unary + [cost(inputs[operand], c.srcs[position]) for c in states[i]]
            else:
                producer = index[operand]
                pair = [[cost(p.dst, c.srcs[position]) for c in states[i]] for p in states[producer]]
                tables.append(((producer, i), np.array(pair)))
        tables.append(((i,), unary))
    choice = minimise(tables, [len(s) for s in states])
    return [s[c] for s, c in zip(states, choice, strict=True)]


def _worth_keeping(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The cheapest candidate for every combination of layouts."""
    best: dict[tuple[MemoryDesc, ...], Candidate] = {}
    for candidate in candidates:
        key = (*candidate.srcs, candidate.dst)
        if key not in best or candidate.cost_ns < best[key].cost_ns:
            best[key] = candidate
    return list(best.values())


def minimise(tables: Sequence[Table], sizes: Sequence[int]) -> list[int]:
    """Return the states, one per variable, with the least sum; exact unless a joint table exceeds MAX_TABLE."""
    live = list(tables)
    remaining = {v for v in range(len(sizes)) if any(v in scope for scope, _ in live)}
    eliminated: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    neighbours: dict[int, set[int]] = {v: set() for v in remaining}
    for scope, _ in live:
        for a, b in itertools.permutations(scope, 2):
            neighbours[a].add(b)

    def joint_size(v: int) -> int:
        size = sizes[v]
        for n in neighbours[v]:
            size *= sizes[n]
        return size

    while remaining:
        variable = min(remaining, key=joint_size)
        if joint_size(variable) > MAX_TABLE:
            break
        mine = [t for t in live if variable in t[0]]
        live = [t for t in live if variable not in t[0]]
        scope = (*sorted(neighbours[variable]), variable)
        total = sum((_spread(t, scope, sizes) for t in mine), np.zeros([sizes[v] for v in scope]))
        eliminated.append((variable, scope[:-1], total.argmin(axis=-1)))
        if len(scope) > 1:
            live.append((scope[:-1], total.min(axis=-1)))
        for n in neighbours[variable]:
            neighbours[n] |= neighbours[variable] - {n}
            neighbours[n].discard(variable)
        remaining.discard(variable)
    choice = _descend(live, sorted(remaining), sizes)
    for variable, scope, best in reversed(eliminated):
        choice[variable] = int(best[tuple(choice[v] for v in scope)])
    return choice


def _spread(table: Table, scope: tuple[int, ...], sizes: Sequence[int]) -> np.ndarray:
    """The table with an axis for every variable of scope, in scope's order."""
    variables, costs = table
    order = sorted(range(len(variables)), key=lambda k: scope.index(variables[k]))
    shape = [sizes[v] if v in variables else 1 for v in scope]
    return costs.transpose(order).reshape(shape)


def _descend(tables: Sequence[Table], variables: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Coordinate descent over `variables` from every uniform start; the best end of all."""
    best_choice, best_cost = [0] * len(sizes), np.inf
    mine = {v: [t for t in tables if v in t[0]] for v in variables}

    def value(table: Table, choice: Sequence[int]) -> float:
        return float(table[1][tuple(choice[v] for v in table[0])])

    for start in range(max((sizes[v] for v in variables), default=1)):
        choice = [min(start, size - 1) for size in sizes]
        changed = True
        while changed:
            changed = False
            for v in variables:
                costs = []
                for state in range(sizes[v]):
                    trial = [*choice[:v], state, *choice[v + 1 :]]
                    costs.append(sum(value(t, trial) for t in mine[v]))
                state = int(np.argmin(costs))
                if costs[state] < costs[choice[v]]:
                    choice[v], changed = state, True
        total = sum(value(t, choice) for t in tables)
        if total < best_cost:
            best_choice, best_cost = choice, total
    return best_choice
