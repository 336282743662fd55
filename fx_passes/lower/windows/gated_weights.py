"""The gate of one image multiplied into the weights of the convolution that reads the product, where they are fewer.

    Before: conv(x * gate, weight)          x [1, C, H, W], gate [1, C, 1, 1], read by nothing else
    After:  conv(x, weight * gate)          weight [O, C, h, w] constant: what is multiplied is smaller

In EfficientNet's early squeeze-and-excitation blocks the value has 20 to 780 times as many numbers as the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.candidates import Argument, Candidate, Operand, Operation, Result, Weights, primitive_template
from fx_passes.candidates.layouts import layout, row_major, spatial_tags
from fx_passes.candidates.specs import RegionValues
from fx_passes.graph.graph import is_call, only_user
from fx_passes.lower.context import LoweringContext, NotLowered
from fx_passes.lower.windows.depthwise import channel_products, is_row
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_WEIGHTS, PostOps

# Scaling and packing weights costs two calls more, about 8 us; a product streams about 12 numbers a nanosecond.
_FEWEST_NUMBERS = 100_000
GATED = "gated_weights"  # in the meta of a product that a convolution takes as its weights
_TIMES_FEWER = 8


def gates_into_weights(graph: fx.Graph, values: RegionValues) -> None:
    """Rewrite every convolution of a gated image that it pays for; graph and values are edited."""
    for conv in [node for node in graph.nodes if is_call(node, ops.convolution)]:
        if len(conv.args) < 2 or (found := _gated(conv, values)) is None:
            continue
        product, value, gate = found
        with graph.inserting_before(conv):
            scaled = graph.call_function(ops.binary, (conv.args[1], gate, "mul"))
        scaled.meta["source"] = product.meta.get("source", "")
        scaled.meta[GATED] = True
        values.infer(scaled)
        conv.args = (value, scaled, *conv.args[2:])
        graph.erase_node(product)
        del values.specs[product]


def _gated(conv: fx.Node, values: RegionValues) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(product, value, gate) of a convolution that reads a product worth leaving out."""
    product: Any = conv.args[0]
    weight: Any = values.constants.get(conv.args[1]) if is_call(product, ops.binary) else None
    if not isinstance(weight, torch.Tensor) or weight.dim() != 4 or values.arguments(conv)["groups"] != 1:
        return None
    if product.args[2] != "mul" or only_user(product) is not conv:
        return None
    spec = values.specs[product]
    gate_shape = (1, *spec.shape[1:2], 1, 1)
    if spec.numel < max(_FEWEST_NUMBERS, _TIMES_FEWER * weight.numel()):
        return None
    for value, gate in (product.args[:2], product.args[1::-1]):
        known = [values.specs.get(node) if isinstance(node, fx.Node) else None for node in (value, gate)]
        if [s and s.shape for s in known] == [spec.shape, gate_shape] and {s and s.dtype for s in known} == {
            spec.dtype
        }:
            return product, value, gate
    return None


def lower_gated_weights(node: fx.Node, weight: torch.Tensor, gate: fx.Node, context: LoweringContext) -> Operation:
    """Lower constant weight [O, C, 1, 1] times gate [1, C, 1, 1]: a depthwise convolution of an image of O pixels."""
    spec, gate_spec = context.values.specs[node], context.tensor(gate, "the gate")
    channels = weight.shape[1] if weight.dim() == 4 else 0
    if tuple(weight.shape[2:]) != (1, 1) or gate_spec.shape != (1, channels, 1, 1) or spec.shape != tuple(weight.shape):
        raise NotLowered("a constant times a tensor computed at run time")
    dtype = context.dtype(spec)
    image = weight.reshape(-1, channels).t().reshape(1, channels, -1, 1)
    seen, dst = layout(tuple(image.shape), dtype, "nhwc"), row_major(spec.shape, dtype)
    gate_desc = layout(gate_spec.shape, dtype, spatial_tags(4)[1])
    operation = Operation(node, node.name, "binary", (gate,), spec)
    for pd in channel_products(seen, None, PostOps()):
        weights = pd.weights_desc
        assert weights is not None
        if not is_row(weights) or weights.size_bytes != gate_desc.size_bytes:
            continue
        args: dict[int, Argument] = {
            ARG_SRC: Weights(str(node.args[0] if node.args[1] is gate else node.args[1]), image, seen),
            ARG_WEIGHTS: Operand(0, weights),
            ARG_DST: Result(seen),
        }
        template = primitive_template(pd, args, "convolution")
        operation.candidates.append(Candidate(pd.implementation, (gate_desc,), dst, (template,)))
    if not operation.candidates:
        raise NotLowered("no depthwise convolution takes these channels")
    return operation
