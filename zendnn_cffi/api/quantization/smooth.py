"""SmoothQuant: move the spread of a linear layer's input channels into its weights, which have more room for it.

    Before: layer_norm(weight, bias) -> x -> linear(W)                      s: a number for each channel of x
    After:  layer_norm(weight / s, bias / s) -> linear(W * s)               where linear layers alone read x
            layer_norm(weight, bias) -> x -> x * (1 / s) -> linear(W * s)   where a residual sum reads it, too

The float model stays what it is, but for rounding. Activations have one scale, so a channel with large values costs
all others their precision (Xiao et al. 2023, https://arxiv.org/abs/2211.10438). Only results of normalizations are
smoothed: theirs are the channels that are large for every input. Smoothing what follows a GELU was measured to lose.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zendnn_cffi.api.quantization.layers import Call, constant_of, has_constant_weight, kind, replace_constant, watch

_STRENGTH = 0.5  # as in the paper: the spread is shared evenly between activations and weights
_PASSING = frozenset(("dropout", "clone", "contiguous"))  # the value itself, in evaluation mode
_NORMS = frozenset(("layer_norm", "rms_norm"))
_SMALLEST = 1e-5


def smooth_linears(exported: fx.GraphModule, calls: Sequence[Call]) -> list[str]:
    """Smooth what linear layers read from normalizations, in place; return the names of those layers.

    exported  what torch.export made, of float32, before it is prepared
    calls     calibration inputs: they tell how large each channel is
    """
    groups = _groups(exported)
    if not groups:
        return []
    largest = _largest(exported, groups, calls)
    seen = {source: readers for source, readers in groups.items() if source in largest}
    for source, readers in seen.items():
        _smooth(exported, source, readers, largest[source])
    exported.graph.eliminate_dead_code()
    exported.recompile()
    return [reader.name for readers in seen.values() for reader in readers]


def _largest(gm: fx.GraphModule, values: Collection[fx.Node], calls: Sequence[Call]) -> dict[fx.Node, Tensor]:
    """The largest magnitude of each channel, the last axis, of some values; of those that ever have a number."""
    found: dict[fx.Node, Tensor] = {}

    def keep(node: fx.Node, args: Any, kwargs: Any, result: Tensor) -> None:
        if node in values and result.numel():
            largest = result.detach().abs().reshape(-1, result.shape[-1]).amax(0)
            found[node] = torch.maximum(found[node], largest) if node in found else largest

    watch(gm, calls, keep)
    return found


def _groups(gm: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """The linear layers that read each normalization's result."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if kind(node) == "linear" and has_constant_weight(gm, node) and kind(_passed(node.args[0])) in _NORMS:
            found.setdefault(node.args[0], []).append(node)
    return found


def _passed(value: fx.Node) -> fx.Node:
    while kind(value) in _PASSING and isinstance(value.args[0], fx.Node):
        value = value.args[0]
    return value


def _smooth(gm: fx.GraphModule, source: fx.Node, readers: list[fx.Node], largest: Tensor) -> None:
    weights = [constant_of(gm, reader.args[1]) for reader in readers]
    columns = torch.stack([weight.detach().abs().amax(0) for weight in weights]).amax(0)
    scales = largest.double().clamp_min(_SMALLEST).pow(_STRENGTH)
    scales /= columns.double().clamp_min(_SMALLEST).pow(1 - _STRENGTH)
    scales /= scales.log().mean().exp()
    for reader, weight in zip(readers, weights, strict=True):
        replace_constant(gm, reader, 1, (weight.double() * scales).to(weight.dtype))
    if (norm := _foldable(source, readers)) is not None:
        for position in range(2, min(len(norm.args), 4)):
            if isinstance(norm.args[position], fx.Node):
                value = constant_of(gm, norm.args[position])
                replace_constant(gm, norm, position, (value.double() / scales).to(value.dtype))
        return
    with gm.graph.inserting_before(readers[0]):
        smoothed = gm.graph.call_function(torch.ops.aten.mul.Tensor, (source, source))
    smoothed.meta = {key: value for key, value in source.meta.items() if key in ("val", "nn_module_stack")}
    replace_constant(gm, smoothed, 1, scales.reciprocal().float())
    for reader in readers:
        reader.replace_input_with(source, smoothed)


def _foldable(source: fx.Node, readers: list[fx.Node]) -> fx.Node | None:
    """The normalization, where its weights are constants and nobody but the readers sees its result."""
    if set(source.users) != set(readers):
        return None
    norm = _passed(source)
    while source is not norm:
        source = source.args[0]
        if len(source.users) > 1:
            return None
    weights = [arg for arg in norm.args[2:4] if isinstance(arg, fx.Node)]
    return norm if weights and norm.args[2] is weights[0] and all(arg.op == "get_attr" for arg in weights) else None
