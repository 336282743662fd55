"""The report's rows: how near each layer is to the float one, where it computes, and why there."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from fx_passes.fuse.projections import PARTS
from zendnn_cffi.api.quantization.choose import Choice
from zendnn_cffi.api.quantization.layers import Call, is_product, kind, module_path, watch
from zendnn_cffi.api.quantization.places import places
from zendnn_cffi.api.quantization_report import INT8, LayerReport, noise_db, sqnr_db

_ROUNDS, _ENOUGH_SECONDS = 15, 5.0
_INTEGERS = (torch.int8, torch.uint8)  # of several calls for one layer, those on integers say where it computes


def _results(gm: fx.GraphModule, call: Call) -> dict[str, torch.Tensor]:
    """What each layer returns."""
    found = {}

    def keep(node: fx.Node, args: Any, kwargs: Any, result: Any) -> None:
        if isinstance(result, torch.Tensor) and is_product(node):
            found[node.name] = result

    watch(gm, [call], keep)
    return found


def _dtypes(fast: Any) -> dict[str, torch.dtype]:
    """What each layer in a region computes in. Those that the optimizer joined are one, under a name of its own."""
    regions = list(fast.regions().values())
    calls = [
        call
        for region in regions
        for lowered in region.lowered.values()
        if lowered is not None
        for call in lowered.program.calls
        if call.implementation != "torch" or call.dtype not in _INTEGERS  # it computes in float
    ]
    found = {call.name: call.dtype for call in sorted(calls, key=lambda call: call.dtype in _INTEGERS)}
    for node in itertools.chain.from_iterable(region.graph.nodes for region in regions):
        if node.name in found:
            found |= dict.fromkeys(node.meta.get(PARTS, ()), found[node.name])
    return found


def layer_rows(
    reference: fx.GraphModule, converted: fx.GraphModule, fast: Any, examples: Sequence[Call], choice: Choice | None
) -> Iterable[LayerReport]:
    """A row for each layer: how near it is to the float one, with all layers before it quantized, too."""
    floats, integers = _results(reference, examples[0]), _results(converted, examples[0])
    dtypes = _dtypes(fast)
    nodes = {node.name: node for node in converted.graph.nodes}
    names = places(nodes[name] for name in integers if name in floats)
    for name, value in integers.items():
        if name in floats:
            computed = dtypes.get(name)
            where = INT8 if computed in _INTEGERS else str(computed or "plain PyTorch")
            if computed is None and choice is not None and name not in choice.layers:
                where = "float"
            near = sqnr_db(floats[name], value)
            node = nodes[name]
            row = LayerReport(
                name, module_path(node), kind(node), near, where.removeprefix("torch."), place=names[name]
            )
            yield row if choice is None else _with_choice(row, choice)


def _with_choice(row: LayerReport, choice: Choice) -> LayerReport:
    if row.name not in choice.gains:
        return row
    gain_ms = choice.gains[row.name]
    if row.name not in choice.alone:  # times alone decided
        why = "" if row.name in choice.layers else "faster in float"
        return dataclasses.replace(row, gain_ms=gain_ms, why=why)
    if row.name in choice.layers:
        why = "its error is worth its gain" if gain_ms else "there was room"
    else:
        why = "its error is too large for its gain" if gain_ms else "no gain"
    return dataclasses.replace(row, alone_db=noise_db(choice.alone[row.name]), gain_ms=gain_ms, why=why)


def compared_ms(plain: nn.Module, fast: nn.Module, example: Call) -> tuple[float, float]:
    """Milliseconds of the float model, optimized, and of the quantized one: medians of calls that take turns."""
    args, kwargs = example
    times: tuple[list[float], list[float]] = ([], [])
    plain(*args, **kwargs)
    begun = time.perf_counter()
    for number in range(_ROUNDS):
        if number > 2 and time.perf_counter() - begun > _ENOUGH_SECONDS:
            break
        for module, found in zip((plain, fast), times, strict=True):
            start = time.perf_counter()
            module(*args, **kwargs)
            found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[0]), statistics.median(times[1])
