"""Remove what changes nothing: row-major copies of which only the values are read, and repeated activations.

Before: transpose -> contiguous -> reshape          relu -> relu
After:  transpose -> reshape                        relu
"""

from __future__ import annotations

import operator

from torch import fx

from fx_passes import ops
from fx_passes.graph import finish, is_call, replace


def fold_identities(gm: fx.GraphModule) -> fx.GraphModule:
    """Remove every operation that returns its input's values."""
    for node in gm.graph.nodes:
        if is_call(node, ops.contiguous) and only_values_count(node) or is_repeated(node):
            replace(node, node.args[0])
    return finish(gm)


def only_values_count(node: fx.Node) -> bool:
    """Whether no reader could see the strides of node: computations cannot, what moves data may hand them on."""
    return all(
        user.op == "call_function"
        and (
            user.target in ops.COMPUTE | ops.SHAPE
            or (user.target in ops.MOVEMENT | {operator.getitem} and only_values_count(user))
        )
        for user in node.users
    )


def is_repeated(node: fx.Node) -> bool:
    """Whether node is an activation that leaves its input as it is: relu after relu, relu after a clip from 0 on."""
    if not is_call(node, ops.eltwise) or not is_call(node.args[0], ops.eltwise):
        return False
    _, kind, alpha, beta = node.args
    _, before, low, high = node.args[0].args
    if (kind, alpha) == ("relu", 0.0):
        return (before, low) == ("relu", 0.0) or (before == "clip" and low >= 0)
    return kind == before == "clip" and alpha <= low and high <= beta
