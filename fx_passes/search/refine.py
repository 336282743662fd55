"""Choose between implementations of equal layouts by their times inside the network.

Alone, a kernel finds its weights and operands in the nearest cache; in the network it finds the weights in memory, and
the operands where the threads of the call before left them. So two implementations that are equally fast alone may not
be so here. All alternatives are tried at once: program k has every operation's k-th choice. The programs take turns,
and operations that do equal work keep what was fastest for all of them together: twelve layers alike are twelve times
as many measurements. The result counts only if the program as a whole is faster, too.
A matrix product of few rows is bound by reading its weights from memory, which its time alone says nothing of: there
every implementation is tried.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from fx_passes.candidates.candidates import Candidate, Operation, measurable, weights_of
from fx_passes.candidates.specs import TensorSpec
from fx_passes.plan.prepack import as_wanted
from fx_passes.search.averages import median
from fx_passes.search.database import Database, Result, kept_ns
from fx_passes.search.from_memory import is_bound_by_weights
from fx_passes.search.measure import fingerprint
from fx_passes.search.noise import made_up
from fx_passes.search.turn import Turn
from zendnn_cffi.runtime.program import Program

log = logging.getLogger("zendnn_cffi.search")

_CHOICES = 3  # per operation, the one that is fastest alone among them
_PROSPECTS = 1.5  # alternatives are at most this many times slower alone
_CLEARLY_FASTER = 0.97
_MOST_UNKNOWN = 0.2  # of the alternatives: another version of this package had others, shipped times are rounded
_ROUNDS, _FEWEST_ROUNDS, _ENOUGH_SECONDS = 9, 3, 1.0
# In a call. Where one takes longer than some 75 ms, operands come from memory anyway, and places hardly matter: of a
# MiniLM 1 x 128 (21 ms) choosing in place saves a fifth, 32 x 32 (110 ms) to 32 x 128 (460 ms) nothing.
_MOST_RUNNING_SECONDS = 1.5
_PACKED_PER_SECOND, _CALL_SECONDS = 0.5e9, 3e-4  # bytes; making the code of a call and running it a few times

Build = Callable[[Sequence[Candidate]], Program]


def refine(
    operations: Sequence[Operation],
    choice: Sequence[Candidate],
    inputs: Sequence[TensorSpec],
    build: Build,
    turn: Turn,
    key: str,
) -> list[Candidate]:
    """Return the choice with implementations replaced by those that are faster in their place; layouts stay.

    inputs    what the region is called with, to make inputs like them
    build     makes a program of a choice
    turn      leave to measure, where the database does not know
    key       names the region and its inputs in the database
    """
    choices = [_alternatives(o, c) for o, c in zip(operations, choice, strict=True)]
    if all(len(own) == 1 for own in choices):
        return list(choice)
    keys = [[f"{key} {o.name} {fingerprint(c)}" if len(own) > 1 else "" for c in own]
            for o, own in zip(operations, choices, strict=True)]  # fmt: skip
    names = [name for own in keys for name in own if name]
    database = turn.database
    unknown = sum(database.get(name) is None for name in names)
    if database.get(f"{key} inside") is None or unknown > _MOST_UNKNOWN * len(names):
        if turn.is_limited and _running_seconds(choices) > _MOST_RUNNING_SECONDS:
            turn.leave_out()
            return list(choice)
        if not turn.allows(needed=_packing_seconds(choices)):
            return list(choice)
        with turn.measuring():
            _measure(operations, choices, keys, inputs, build, database, key)
    alone, inside = database.get(f"{key} alone"), database.get(f"{key} inside")
    if alone is None or inside is None or inside.time_ns >= alone.time_ns:
        return list(choice)
    return _fastest(choices, keys, database)


def _running_seconds(choices: Sequence[Sequence[Candidate]]) -> float:
    """How long the fewest runs of all programs take, at the least."""
    runs = (max(map(len, choices)) + 2) * (1 + _FEWEST_ROUNDS)
    return runs * sum(own[0].cost_ns for own in choices if own[0].calls) / 1e9


def _packing_seconds(choices: Sequence[Sequence[Candidate]]) -> float:
    """How long making the programs takes, roughly: most of it goes into packing weights for each."""
    packed_bytes = sum(_packed_bytes(own[0]) for own in choices)
    return (max(map(len, choices)) + 2) * (packed_bytes / _PACKED_PER_SECOND + _CALL_SECONDS * len(choices))


def _packed_bytes(candidate: Candidate) -> int:
    """Bytes of the constants that are brought into another layout. Tables of embeddings are read where they lie."""
    return sum(weights.desc.size_bytes for weights in weights_of(candidate) if as_wanted(weights) is None)


def _alternatives(operation: Operation, chosen: Candidate) -> list[Candidate]:
    """The chosen candidate, then others that can stand in for it, fastest first."""
    if not measurable([chosen]):
        return [chosen]

    def place(c: Candidate) -> tuple[object, ...]:
        return c.srcs, c.dst, c.overwrites

    rivals = [c for c in measurable(operation.candidates) if c is not chosen and place(c) == place(chosen)]
    if is_bound_by_weights(operation, chosen):
        return [chosen, *rivals]
    others = [c for c in rivals if c.cost_ns <= _PROSPECTS * chosen.cost_ns]
    return [chosen, *sorted(others, key=lambda c: c.cost_ns)[: _CHOICES - 1]]


def _measure(
    operations: Sequence[Operation],
    choices: Sequence[Sequence[Candidate]],
    keys: Sequence[Sequence[str]],
    inputs: Sequence[TensorSpec],
    build: Build,
    database: Database,
    key: str,
) -> None:
    """Put into the database each alternative's time in its place, and the time of the whole before and after."""
    tensors = [made_up(spec) for spec in inputs]
    count = max(map(len, choices))
    programs = [build([own[min(k, len(own) - 1)] for own in choices]) for k in range(count)]
    times = _take_turns(programs, tensors)
    per_operation = [_by_operation(p, t) for p, t in zip(programs, times, strict=True)]
    for operation, own in zip(operations, keys, strict=True):
        for k, name in enumerate(own):
            rounds = per_operation[k].get(operation.name)
            if name and rounds:
                database.put(name, Result(kept_ns(median(rounds)), 0.0, True))
    for program in programs[1:]:
        program.close()
    refined = build(_fastest(choices, keys, database))
    before, after = ([sum(calls) for calls in t] for t in _take_turns([programs[0], refined], tensors))
    database.put(f"{key} alone", Result(kept_ns(median(before)), 0.0, True))
    database.put(f"{key} inside", Result(kept_ns(median(after)), 0.0, True))
    log.debug("chosen alone %.3f ms, inside %.3f ms", *(median(t) / 1e6 for t in (before, after)))
    for program in (programs[0], refined):
        program.close()


def _fastest(
    choices: Sequence[Sequence[Candidate]], keys: Sequence[Sequence[str]], database: Database
) -> list[Candidate]:
    """Of operations with equal alternatives the one that was clearly fastest in their places, else that alone."""
    totals: dict[tuple[str, ...], list[float]] = {}
    works = [tuple(name.rpartition(" ")[2] for name in names) for names in keys]  # keys end in fingerprints
    for work, names in zip(works, keys, strict=True):
        times = [result.time_ns for result in map(database.get, names) if result is not None] if len(names) > 1 else []
        if times and len(times) == len(names):
            totals[work] = [a + b for a, b in zip(totals.get(work, [0.0] * len(times)), times, strict=True)]
    best = []
    for own, work in zip(choices, works, strict=True):
        times = totals.get(work, [0.0])
        fastest = min(range(len(times)), key=times.__getitem__)
        best.append(own[fastest] if times[fastest] < _CLEARLY_FASTER * times[0] else own[0])
    return best


def _take_turns(programs: Sequence[Program], inputs: Sequence[torch.Tensor]) -> list[list[list[int]]]:
    """Per program and round the time of each call, ns."""
    times: list[list[list[int]]] = [[] for _ in programs]
    for program in programs:
        program(inputs)
    start = time.perf_counter()
    while len(times[0]) < _ROUNDS:
        if len(times[0]) >= _FEWEST_ROUNDS and time.perf_counter() - start > _ENOUGH_SECONDS:
            break
        for program, rounds in zip(programs, times, strict=True):
            rounds.append(program.run_timed(inputs)[1])
    return times


def _by_operation(program: Program, rounds: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """The times of each operation, a round each: an operation may be several calls."""
    found: dict[str, list[int]] = {}
    for number, call in enumerate(program.calls):
        own = found.setdefault(call.name, [0] * len(rounds))
        for k, times in enumerate(rounds):
            own[k] += times[number]
    return found
