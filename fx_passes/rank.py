"""The number of dimensions of a node's result, where the graph itself tells."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.graph import is_call

_SAME = {ops.eltwise, ops.prelu, ops.softmax, ops.batch_norm, ops.layer_norm, ops.linear, ops.pool, ops.adaptive_pool,
         ops.transpose, ops.narrow, ops.resample, ops.concat}  # fmt: skip


def rank(node: Any) -> int | None:
    """Return how many dimensions node has, or None where that depends on the inputs."""
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.ndim
    if is_call(node, ops.reshape, ops.permute):
        return len(node.args[1])
    if is_call(node, ops.convolution, ops.deconvolution):
        # A convolution also takes one image without its batch dimension.
        return rank(node.args[0])
    if is_call(node, ops.flatten):
        start, end = node.args[1], node.args[2]
        if end == -1 and start >= 0:
            return start + 1
    if node.op == "call_function" and node.target in _SAME:
        source = node.args[0][0] if node.target is ops.concat else node.args[0]
        return rank(source)
    return None
