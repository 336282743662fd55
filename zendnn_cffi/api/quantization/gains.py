"""How long each layer takes in float and in integers: its time inside the one optimized model, and inside the other."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from fx_passes.report.profile import profile
from fx_passes.report.records import PrimitiveTime
from zendnn_cffi.api.quantization.layers import Call

_ROUNDS, _RUNS = 3, 5
_PRODUCTS = ("matmul", "inner_product", "convolution", "gemm")


class LayerTimes(NamedTuple):
    """Milliseconds of each layer, with what is computed behind it, and of the whole models.

    floats, integers  by the layers' names, those alone that both models have a time for
    float_ms, int8_ms  of the float and of the quantized model
    """

    floats: Mapping[str, float]
    integers: Mapping[str, float]
    float_ms: float
    int8_ms: float

    def gain_ms(self, name: str) -> float:
        """What integers save the layer, negative where they take longer, and 0 where that is not known."""
        return self.floats[name] - self.integers[name] if name in self.floats else 0.0


def layer_times(plain: Any, fast: Any, call: Call, work: Mapping[str, int], nodes: Collection[str]) -> LayerTimes:
    """Run both modules in turns; the least time of each layer counts.

    plain, fast  the float and the quantized model, optimized from graphs that name their nodes alike
    work         the layers' names, and what shares the time of layers that the optimizer joined: their weights' sizes
    nodes        names of all nodes of those graphs
    """
    times: tuple[dict[str, float], dict[str, float]] = ({}, {})
    totals_ms = [math.inf, math.inf]
    for _ in range(_ROUNDS):
        for number, (module, least) in enumerate(zip((plain, fast), times, strict=True)):
            try:
                found = profile(module, *call[0], runs=_RUNS, **call[1])
            except TypeError:  # no region: all of it is plain PyTorch
                continue
            totals_ms[number] = min(totals_ms[number], found.total_ns / 1e6)
            for name, time_ms in shared_out(found.records, work, nodes).items():
                least[name] = min(least.get(name, time_ms), time_ms)
    both = times[0].keys() & times[1].keys()
    floats, integers = ({name: each[name] for name in work if name in both} for each in times)
    float_ms, int8_ms = (total if total < math.inf else 0.0 for total in totals_ms)
    return LayerTimes(floats, integers, float_ms, int8_ms)


def shared_out(records: list[PrimitiveTime], work: Mapping[str, int], nodes: Collection[str]) -> dict[str, float]:
    """Milliseconds of each layer, with what runs behind it up to the next one, and what converts a value for it.

    Products under new names are several layers, joined: those without a time share it.
    """
    times: dict[str, float] = {}
    others: dict[str, float] = {}  # by the layer they are counted with
    joined = ahead = 0.0
    last = ""  # the layer before; "" ahead of the first, and behind joined ones
    for record in records:
        time_ms = record.time_ns / 1e6
        reader = record.name.rpartition(" for ")[2]
        if record.name in work:
            last = record.name
            times[last] = times.get(last, 0.0) + time_ms
        elif record.name not in nodes and record.flops and record.kind in _PRODUCTS:
            last = ""
            joined += time_ms
        elif (reader if reader in work else last) in work:
            owner = reader if reader in work else last
            others[owner] = others.get(owner, 0.0) + time_ms
        elif joined:
            joined += time_ms
        else:
            ahead += time_ms
    missing = {name: size for name, size in work.items() if name not in times}
    if joined and missing:
        times |= {name: joined * size / sum(missing.values()) for name, size in missing.items()}
    first = next(iter(times), "")
    return {name: time_ms + others.get(name, 0.0) + ahead * (name == first) for name, time_ms in times.items()}


def weight_sizes(prepared: fx.GraphModule, layers: list[str]) -> dict[str, int]:
    """The number of weights of each layer."""
    sizes = {}
    for node in prepared.graph.nodes:
        if node.name in layers:
            value = node.args[1].args[0].meta.get("val")
            sizes[node.name] = value.numel() if isinstance(value, torch.Tensor) else 1
    return {name: int(sizes[name]) for name in layers}
