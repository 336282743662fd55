"""What integers gain each layer: its time inside the optimized float model, less that inside the quantized one."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from fx_passes.report.profile import profile
from fx_passes.report.records import PrimitiveTime
from zendnn_cffi.api.quantization.layers import Call

_ROUNDS, _RUNS = 3, 5
_PRODUCTS = ("matmul", "inner_product", "convolution", "gemm")


def layer_gains(
    plain: Any, fast: Any, call: Call, work: Mapping[str, int], nodes: Collection[str]
) -> tuple[dict[str, float], tuple[float, float]]:
    """Milliseconds gained by each layer, at least 0, and those that the float and the quantized model take in all.

    plain, fast  the float and the quantized model, optimized from graphs that name their nodes alike
    work         the layers' names, and what shares the time of layers that the optimizer joined: their weights' sizes
    nodes        names of all nodes of those graphs

    The modules take turns, and the least time of each counts. Conversions between layers are in no layer's gain.
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
    gains = {name: max(times[0][name] - times[1][name], 0.0) if all(name in t for t in times) else 0.0 for name in work}
    float_ms, int8_ms = (total if total < math.inf else 0.0 for total in totals_ms)
    return gains, (float_ms, int8_ms)


def shared_out(records: list[PrimitiveTime], work: Mapping[str, int], nodes: Collection[str]) -> dict[str, float]:
    """Milliseconds of each layer. Products under new names are several, joined: those without a time share it."""
    times: dict[str, float] = {}
    joined = 0.0
    for record in records:
        if record.name in work:
            times[record.name] = times.get(record.name, 0.0) + record.time_ns / 1e6
        elif record.name not in nodes and record.flops and record.kind in _PRODUCTS:
            joined += record.time_ns / 1e6
    missing = {name: size for name, size in work.items() if name not in times}
    if joined and missing:
        times |= {name: joined * size / sum(missing.values()) for name, size in missing.items()}
    return times


def weight_sizes(prepared: fx.GraphModule, layers: list[str]) -> dict[str, int]:
    """The number of weights of each layer."""
    sizes = {}
    for node in prepared.graph.nodes:
        if node.name in layers:
            value = node.args[1].args[0].meta.get("val")
            sizes[node.name] = value.numel() if isinstance(value, torch.Tensor) else 1
    return {name: int(sizes[name]) for name in layers}
