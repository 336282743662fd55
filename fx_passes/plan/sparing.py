"""Where two implementations are about as fast, take the one that needs less memory for its weights.

Packed weights are copies beside the parameters. A copy in a further layout, or a transformed one, is to be worth it.
Weights that are there already cost nothing: a parameter that is read where it lies, or what another program packed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from fx_passes.candidates.candidates import Candidate, Operation, measurable, weights_of
from fx_passes.plan.prepack import WeightStore, layout_key

LITTLE = 1.02  # times the time of the fastest, that may be given for it
_WORTH_BYTES = 64 << 10  # less is not looked at


def spare_weights(
    operations: Sequence[Operation],
    choice: Sequence[Candidate],
    store: WeightStore,
    storages: Collection[int],
    comparable: Callable[[Candidate, Candidate], bool],
) -> list[Candidate]:
    """Return the choice with implementations that need fewer bytes, where these cost little time; layouts stay.

    store     weights that programs of the region have
    storages  addresses of the parameters' memory
    comparable  whether the times of two candidates say which is the faster: estimates mostly do not
    """
    return [
        _sparing(operation, chosen, store, storages, comparable)
        for operation, chosen in zip(operations, choice, strict=True)
    ]


def _sparing(
    operation: Operation,
    chosen: Candidate,
    store: WeightStore,
    storages: Collection[int],
    comparable: Callable[[Candidate, Candidate], bool],
) -> Candidate:
    own_bytes = added_bytes(chosen, store, storages)
    if own_bytes < _WORTH_BYTES or not measurable([chosen]):
        return chosen
    best, best_bytes = chosen, own_bytes - _WORTH_BYTES
    for other in measurable(operation.candidates):
        if (other.srcs, other.dst, other.overwrites) != (chosen.srcs, chosen.dst, chosen.overwrites):
            continue
        if other.expected_ns <= LITTLE * chosen.expected_ns and comparable(chosen, other):
            other_bytes = added_bytes(other, store, storages)
            if other_bytes < best_bytes:
                best, best_bytes = other, other_bytes
    return best


def added_bytes(candidate: Candidate, store: WeightStore, storages: Collection[int]) -> int:
    """Bytes of weights that have to be packed for a candidate, or are kept for it alone."""
    wanted = {(w.key, layout_key(w.desc), w.transposed): w for w in weights_of(candidate)}
    return sum(store.added_bytes(weights, storages) for weights in wanted.values())
