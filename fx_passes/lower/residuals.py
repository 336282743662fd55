"""What residual connections add up stays float32 in regions that compute in bf16.

    sum = linear(y) + stream      float32; y is bf16, and so is the weight
    stream = layer_norm(sum)      float32, as the next sum adds it; linear layers read a bf16 copy

Each rounding of such a sum goes through all layers that follow. On BERT-base, rounding sums and the values added to
them costs 8 dB of 47; that of weights, products and attention together decides the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.graph.graph import is_call
from fx_passes.lower.context import LoweringContext

_NORMS = (ops.layer_norm, ops.rms_norm)


def kept_dtype(node: fx.Node, context: LoweringContext) -> torch.dtype:
    """The dtype that node's value has inside the region."""
    spec = context.values.specs[node]
    dtype = context.dtype(spec)
    if dtype == torch.bfloat16 and spec.dtype == torch.float32 and _is_residual(node, context):
        return torch.float32
    return dtype


def _is_residual(node: fx.Node, context: LoweringContext) -> bool:
    """Whether it is a sum that a normalization of rows reads, that one's result, or on its way into such a sum."""
    if _is_normalized(node, context) or (node.target in _NORMS and _is_normalized(node.args[0], context)):
        return True
    if node.target not in _NORMS and not _addends(node, context):
        return False
    return any(node in _addends(user, context) and _is_normalized(user, context) for user in node.users)


def _is_normalized(node: Any, context: LoweringContext) -> bool:
    """Whether it is a sum, and a normalization reads it."""
    if not isinstance(node, fx.Node) or not any(user.target in _NORMS and user.args[0] is node for user in node.users):
        return False
    return bool(_addends(node, context))


def _addends(node: fx.Node, context: LoweringContext) -> list[fx.Node]:
    """What a linear layer's post-ops, or a sum of two values, add that is as large as the result."""
    if is_call(node, ops.linear):
        found = [entry[2] for entry in node.kwargs.get("post_ops", ()) if tuple(entry[:2]) == ("binary", "add")]
    elif is_call(node, ops.binary) and context.values.arguments(node)["kind"] == "add":
        found = list(node.args[:2])
    else:
        return []
    specs, shape = context.values.specs, context.values.specs[node].shape
    return [other for other in found if isinstance(other, fx.Node) and other in specs and specs[other].shape == shape]
