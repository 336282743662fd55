"""Cases of recurrent layers: every kind of cell, both directions, with and without states, projected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from zendnn_cffi.primitives.descriptors import OpDesc, recurrent
from zendnn_cffi.primitives.descriptors.recurrent import GATES
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.verification.cases import F32, FLOATS, Case, case, name_of

_SIZES = ((1, 1, 16, 16), (5, 3, 17, 33), (3, 16, 32, 64), (7, 1, 33, 40))  # T, N, I, H


def recurrents(dtype: torch.dtype) -> Iterator[Case]:
    for kind, reverse, states, sizes in product(GATES, (False, True), (False, True), _SIZES):
        for width in (0, 24) if kind == "lstm" else (0,):
            name = " ".join((kind, "reverse" * reverse, "states" * states, f"projected {width}" * bool(width)))
            make = partial(layer, kind, dtype, sizes, reverse=reverse, states=states, width=width)
            yield case(f"recurrent {name_of(dtype)} {name} {sizes}", make)


def layer(
    kind: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    *,
    reverse: bool = False,
    states: bool = False,
    width: int = 0,
) -> OpDesc:
    """The descriptor of one layer; width of its projection, 0: none."""
    (steps, samples, inputs, hidden), gates = sizes, GATES[kind]
    row = MemoryDesc((1, 1, samples, width or hidden), dtype) if states else None
    cell = MemoryDesc((1, 1, samples, hidden), F32) if states and kind == "lstm" else None
    return recurrent(
        MemoryDesc((steps, samples, inputs), dtype),
        MemoryDesc((1, 1, inputs, gates, hidden), dtype, "any"),
        MemoryDesc((1, 1, width or hidden, gates, hidden), dtype, "any"),
        MemoryDesc((1, 1, gates + (kind == "gru"), hidden), F32),
        MemoryDesc((steps, samples, width or hidden), dtype),
        kind=kind,
        reverse=reverse,
        projection=MemoryDesc((1, 1, hidden, width), dtype, "any") if width else None,
        src_iter=row,
        src_iter_c=cell,
        dst_iter=row,
        dst_iter_c=cell,
    )


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {f"recurrent {name_of(t)}": partial(recurrents, t) for t in FLOATS}
