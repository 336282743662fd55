"""Choose one candidate per operation so that kernels and the reorders between them cost least.

Each value is a variable. Its states are the candidates worth keeping (the cheapest for every combination of layouts),
each with a set of further layouts that the value is reordered to at once, for readers to share. A state costs its
kernel and its reorders; a pair of states of a producer and a reader costs nothing if the reader finds the layout it
wants, and a reorder of its own if not. The least sum is found by variable elimination: take the variable with the
smallest joint table, add up the tables that mention it, minimise it out, remember the minimiser, go on; then read the
choices backwards. That is exact, and cheap on chains and residual graphs, whose joint tables span two or three
variables. Where a joint table would grow past a bound (densely connected blocks), the rest is settled by coordinate
descent from the best uniform start.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import fx

from fx_passes.candidates.candidates import Candidate, Operation
from fx_passes.candidates.layouts import Layout, same_bytes
from zendnn_cffi.runtime.courtesy import give_way
from zendnn_cffi.values import dataclass

MAX_TABLE = 1 << 20
Table = tuple[tuple[int, ...], np.ndarray]
ReorderCost = Callable[[Layout, Layout], float]


@dataclass(frozen=True)
class State:
    """One state of a value: how it is computed (None: it is a region input), where it lies, what it is reordered to."""

    candidate: Candidate | None
    layouts: tuple[Layout, ...]
    cost_ns: float


def assign_layouts(
    operations: Sequence[Operation],
    inputs: Mapping[fx.Node, Layout],
    outputs: Mapping[fx.Node, Layout],
    reorder_ns: ReorderCost,
) -> list[Candidate]:
    """Return the chosen candidate of each operation.

    inputs      layout in which each region input arrives
    outputs     layout in which each region output must leave
    reorder_ns  cost of a reorder between two layouts that are not the same bytes
    """

    prices: dict[tuple[Layout, Layout], float] = {}  # a dense block asks ten times for each

    def cost(have: Layout, want: Layout) -> float:
        price = prices.get((have, want))
        if price is None:
            price = prices[have, want] = 0.0 if same_bytes(have, want) else reorder_ns(have, want)
        return price

    kept = {operation.node: _worth_keeping(operation.candidates) for operation in operations}
    wanted = _wanted_layouts(operations, kept, outputs)
    states: dict[fx.Node, list[State]] = {}
    for node, desc in inputs.items():
        states[node] = _with_reorders([State(None, (desc,), 0.0)], wanted.get(node, []), cost)
    for operation in operations:
        give_way()
        own = [State(c, (c.dst,), c.expected_ns) for c in kept[operation.node]]
        states[operation.node] = _with_reorders(own, wanted.get(operation.node, []), cost)

    def reading(state: State, want: Layout) -> float:
        if any(same_bytes(have, want) for have in state.layouts):
            return 0.0
        return cost(state.layouts[0], want)

    index = {node: i for i, node in enumerate(states)}
    tables: list[Table] = []
    for node, own in states.items():
        costs = [s.cost_ns + (reading(s, outputs[node]) if node in outputs else 0.0) for s in own]
        tables.append(((index[node],), np.array(costs)))
    for operation in operations:
        give_way()
        readers = states[operation.node]
        for position, operand in enumerate(operation.operands):
            wants = [s.candidate.srcs[position] for s in readers if s.candidate is not None]
            pair = [[reading(state, want) for want in wants] for state in states[operand]]
            tables.append(((index[operand], index[operation.node]), np.array(pair)))
    choice = minimise(tables, [len(own) for own in states.values()])
    chosen = [states[operation.node][choice[index[operation.node]]].candidate for operation in operations]
    return [candidate for candidate in chosen if candidate is not None]


def _wanted_layouts(
    operations: Sequence[Operation], kept: Mapping[fx.Node, Sequence[Candidate]], outputs: Mapping[fx.Node, Layout]
) -> dict[fx.Node, list[Layout]]:
    """For every value with several readers, the layouts that at least two of them may ask for."""
    asked: dict[fx.Node, list[list[Layout]]] = {node: [[desc]] for node, desc in outputs.items()}
    for operation in operations:
        for position, operand in enumerate(operation.operands):
            asked.setdefault(operand, []).append(_distinct([c.srcs[position] for c in kept[operation.node]]))
    shared = {}
    for node, readers in asked.items():
        every = _distinct([desc for descs in readers for desc in descs])
        shared[node] = [d for d in every if sum(any(same_bytes(d, e) for e in descs) for descs in readers) > 1]
    return shared


def _distinct(descs: Sequence[Layout]) -> list[Layout]:
    found: list[Layout] = []
    for desc in descs:
        if not any(same_bytes(desc, other) for other in found):
            found.append(desc)
    return found


def _with_reorders(own: Sequence[State], wanted: Sequence[Layout], cost: ReorderCost) -> list[State]:
    """Every state with every set of further layouts that readers might share."""
    states = []
    for state in own:
        others = [desc for desc in wanted if not same_bytes(desc, state.layouts[0])]
        for count in range(len(others) + 1):
            for extra in itertools.combinations(others, count):
                price = sum(cost(state.layouts[0], desc) for desc in extra)
                states.append(State(state.candidate, (*state.layouts, *extra), state.cost_ns + price))
    return states


def _worth_keeping(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The cheapest candidate for every combination of layouts."""
    best: dict[tuple[Layout, ...], Candidate] = {}
    for candidate in candidates:
        key = (*candidate.srcs, candidate.dst)
        if key not in best or candidate.expected_ns < best[key].expected_ns:
            best[key] = candidate
    return list(best.values())


def minimise(tables: Sequence[Table], sizes: Sequence[int]) -> list[int]:
    """Return the states, one per variable, with the least sum; exact unless a joint table exceeds MAX_TABLE."""
    live = [_of_several_states(table, sizes) for table in tables]
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


def _of_several_states(table: Table, sizes: Sequence[int]) -> Table:
    """The table without variables that have one state: a joint table has an axis a variable, and numpy allows 64."""
    scope = tuple(v for v in table[0] if sizes[v] > 1)
    return scope, table[1].reshape([sizes[v] for v in scope])


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

    def costs_of(v: int, choice: Sequence[int]) -> np.ndarray:
        total = np.zeros(sizes[v])
        for scope, costs in mine[v]:
            total += costs[tuple(slice(None) if u == v else choice[u] for u in scope)]
        return total

    for start in range(max((sizes[v] for v in variables), default=1)):
        choice = [min(start, size - 1) for size in sizes]
        changed = True
        while changed:
            changed = False
            for v in variables:
                costs = costs_of(v, choice)
                state = int(np.argmin(costs))
                if costs[state] < costs[choice[v]]:
                    choice[v], changed = state, True
        total = sum(float(costs[tuple(choice[v] for v in scope)]) for scope, costs in tables)
        if total < best_cost:
            best_choice, best_cost = choice, total
    return best_choice
