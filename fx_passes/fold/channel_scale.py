"""Let a convolution or linear multiply with, or add, one constant per channel through its weights and bias.

Before: linear(x, w, b) -> permute -> binary(.., layer_scale, "mul")      Needs: normalize, fold_batch_norm
After:  linear(x, scale_channels(w, layer_scale), scale_channels(b, layer_scale)) -> permute
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.fold.casts import is_cast
from fx_passes.graph.graph import finish, is_call, is_constant, only_user, replace, tensor_of
from fx_passes.graph.inference import dtype, rank


def fold_channel_scale(gm: fx.GraphModule) -> fx.GraphModule:
    """Fold every per-channel constant whose producer nobody else reads."""
    for node in gm.graph.find_nodes(op="call_function", target=ops.binary):
        if (match := match_producer(gm, node)) is not None:
            fold(*match, node)
    return finish(gm)


def match_producer(gm: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(producer, value read by node, constant): the constant has a size other than 1 along the channels only."""
    a, b, kind = node.args
    value, constant = (b, a) if is_constant(a) else (a, b)
    shape_of = tensor_of(gm, constant)
    if kind not in ("mul", "add") or shape_of is None or not is_constant(constant):
        return None
    producer, order = value, None
    if is_call(value, ops.permute) and only_user(value) is node:
        producer, order = value.args[0], value.args[1]
    if not is_call(producer, ops.convolution, ops.linear) or only_user(producer) not in (node, value):
        return None
    weight = producer.args[1]
    if producer.kwargs["post_ops"] or not all(map(is_constant, producer.args[1:])):
        return None
    if dtype(weight, gm) != shape_of.dtype:
        return None
    # Counted from the last dimension, so that a missing batch dimension does not matter.
    channel = -1 if producer.target is ops.linear else -1 - len(producer.kwargs["stride"])
    fewest = -channel  # dimensions that value has in any case
    if order is not None:
        channel = [d - len(order) if d >= 0 else d for d in order].index(channel) - len(order)
    wide = [i - shape_of.ndim for i, n in enumerate(shape_of.shape) if n != 1]
    if wide != [channel] or shape_of.ndim > (rank(value) or fewest):
        return None  # a constant of more dimensions would give the result more
    weight_sizes, *others = (_sizes(gm, given) for given in producer.args[1:] if given is not None)
    outputs = (shape_of.shape[channel],)
    if weight_sizes is None or weight_sizes[:1] != outputs or any(sizes != outputs for sizes in others):
        return None  # one channel times several is several, and a bias may be a matrix
    return producer, value, constant


def _sizes(gm: fx.GraphModule, node: fx.Node) -> tuple[Any, ...] | None:
    """The shape of a constant, or of what is computed of one; None where it is unknown."""
    if is_call(node, ops.add_channels):
        sizes = _sizes(gm, node.args[2])
        return None if sizes is None else sizes[:1]
    if is_call(node, ops.scale_channels, ops.dequantize) or is_cast(node):
        return _sizes(gm, node.args[0])
    if is_call(node, ops.transpose, ops.permute):
        if (inner := _sizes(gm, node.args[0])) is None:
            return None
        like = torch.empty(inner, dtype=torch.float32, device="meta")
        return tuple(node.target(like, *node.args[1:]).shape)
    value = tensor_of(gm, node) if node.op == "get_attr" else node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def fold(producer: fx.Node, value: fx.Node, constant: fx.Node, node: fx.Node) -> None:
    """node's readers read value, of which producer has new weights."""
    src, weight, bias = producer.args
    graph = node.graph
    with graph.inserting_before(producer):
        if node.args[2] == "mul":
            weight = graph.call_function(ops.scale_channels, (weight, constant))
            bias = None if bias is None else graph.call_function(ops.scale_channels, (bias, constant))
        else:
            bias = graph.call_function(ops.add_channels, (bias, constant, weight))
    producer.args = (src, weight, bias)
    producer.meta.setdefault("folded", []).append(node.meta.get("source", node.name))
    replace(node, value)
