"""Operations that find their weights in memory, not in a cache: they are timed alike.

A matrix product of few rows reads each weight once or twice. Alone, repeated, it finds them in the last cache; in a
network whose weights do not fit there, the weights of other layers have taken their place when the next call comes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from fx_passes.candidates.candidates import Candidate, Operation, weights_bytes
from fx_passes.lower.products.matrix_vector import NAME as MATRIX_VECTOR
from zendnn_cffi.engine.host import last_cache_bytes

KEY = "weights in memory: "  # begins the keys of such times
_FLOPS_PER_BYTE = 4  # of weights: with fewer, memory is slower than arithmetic on every machine this is for
LEAST_BYTES = 1 << 20  # of weights: of fewer, caches hold a part, and the rest of a call counts more
_MATRIX_VECTOR_SHARE = 0.85  # of the others' time, which reach three quarters of the bandwidth
_TIMES_THE_CACHE = 1.5  # are read to replace what is in it: it may be shared, and does not always drop the oldest


def is_bound_by_weights(operation: Operation, candidate: Candidate) -> bool:
    """Whether reading the weights of a matrix product from memory takes longer than multiplying by them."""
    if operation.kind != "inner_product":
        return False
    return operation.flops < _FLOPS_PER_BYTE * weights_bytes(candidate)


def exceed_the_cache(operations: Sequence[Operation]) -> bool:
    """Whether the weights of all operations together do not fit into the last cache."""
    smallest = [min(map(weights_bytes, operation.candidates), default=0) for operation in operations]
    return sum(smallest) > last_cache_bytes()


def product_of(candidate: Candidate) -> str:
    """The implementation of its first call, which reads the weights."""
    return candidate.implementation.partition(" + ")[0]


def read_at_full_speed(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Estimates of what reads its weights from memory: PyTorch's batched product, where there is one, is fastest."""
    others_ns = min((c.cost_ns for c in candidates if product_of(c) != MATRIX_VECTOR), default=math.inf)
    return [
        replace(c, cost_ns=min(c.cost_ns, _MATRIX_VECTOR_SHARE * others_ns), from_memory=True)
        if product_of(c) == MATRIX_VECTOR
        else c
        for c in candidates
    ]


def empty_caches() -> None:
    """Read so much other memory that nothing is left in the caches of what was used before; some ms."""
    torch.sum(_other_memory())


@lru_cache(maxsize=1)
def _other_memory() -> torch.Tensor:
    count = int(_TIMES_THE_CACHE * last_cache_bytes()) // 4
    with torch.inference_mode(False):
        return torch.ones(count, dtype=torch.float32, device="cpu")  # zeros might all be one page of memory


def let_go() -> None:
    """Give back the memory that is read."""
    _other_memory.cache_clear()
