"""Which layers are faster in integers, with the conversions where the two precisions meet.

    Before: conv[u8] -> depthwise[u8] -> conv[u8]       each kernel's time is known, in float and in integers
    After:  conv[f32] -> depthwise[f32] -> conv[u8]     where integers save the last one more than a conversion takes

Each layer is a variable of two states. A pair of neighbours in different states pays for the value between them, so the
least sum is found as it is for layouts (fx_passes.layout.assign).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from fx_passes.layout.assign import Table, minimise
from zendnn_cffi.api.quantization.gains import LayerTimes
from zendnn_cffi.api.quantization.layers import Call, watch

WORTH_IT = 0.97  # of the time before: less of a difference is noise
_CALL_MS = 2e-3
_BYTES_PER_MS = 10e6
_BYTES = 5  # float32 is read and an integer written, or the other way round


def faster_in_integers(layers: Sequence[str], times: LayerTimes, links: Mapping[tuple[str, str], int]) -> list[str]:
    """The layers to compute in integers for the least time; all of them where the others gain little.

    links  a layer, one that reads its value, and how many numbers this has
    """
    index = {name: position for position, name in enumerate(layers)}
    tables: list[Table] = []
    for name in times.floats:
        tables.append(((index[name],), np.array([times.floats[name], times.integers[name]])))
    for (source, reader), size in links.items():
        price = _CALL_MS + _BYTES * size / _BYTES_PER_MS
        tables.append(((index[source], index[reader]), np.array([[0.0, price], [price, 0.0]])))
    states = minimise(tables, [2] * len(layers))
    before, after = (_cost(tables, choice) for choice in ([1] * len(layers), states))
    if after - before >= (WORTH_IT - 1) * times.int8_ms:
        return list(layers)
    return [name for name in layers if states[index[name]]]


def _cost(tables: Sequence[Table], choice: Sequence[int]) -> float:
    return float(sum(table[tuple(choice[variable] for variable in scope)] for scope, table in tables))


def links_between(gm: fx.GraphModule, layers: Sequence[str], call: Call) -> dict[tuple[str, str], int]:
    """Each layer with the last one that its operands come from, and how many numbers that one returns for this call."""
    sizes: dict[str, int] = {}

    def see(node: fx.Node, args: Any, kwargs: Any, result: Any) -> None:
        if node.name in index and isinstance(result, torch.Tensor):
            sizes[node.name] = result.numel()

    index = {name: position for position, name in enumerate(layers)}
    watch(gm, [call], see)
    behind: dict[fx.Node, str] = {}  # the last layer that a value comes from
    links: dict[tuple[str, str], int] = {}
    for node in gm.graph.nodes:
        before = [behind[source] for source in node.all_input_nodes if source in behind]
        if before:
            behind[node] = max(before, key=index.__getitem__)
        if node.name in index:
            links |= {(source, node.name): sizes.get(source, 0) for source in before}
            behind[node] = node.name
    return links
