"""Answer questions about shapes where the graph knows the answer, and drop assertions that hold.

    Before: size(relu(x), 0); rank(conv(x)) == 4 -> torch._assert
    After:  size(x, 0)

What is left reads earlier values, so fewer tensors have to leave a region for the sake of their shape.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fx_passes import ops
from fx_passes.facts import rank
from fx_passes.graph import ARITHMETIC, finish, is_call, replace

_SAME_SHAPE = (ops.eltwise, ops.prelu, ops.softmax, ops.batch_norm, ops.layer_norm, ops.contiguous)


def fold_shapes(gm: fx.GraphModule) -> fx.GraphModule:
    """Fold sizes, ranks, arithmetic over them and torch._assert."""
    for node in gm.graph.nodes:
        if is_call(node, *ops.SHAPE):
            while is_call(node.args[0], *_SAME_SHAPE) and not node.args[0].kwargs.get("post_ops"):
                node.args = (node.args[0].args[0], *node.args[1:])
            if node.target is ops.rank and (known := rank(node.args[0])) is not None:
                replace(node, known)
        elif is_call(node, *(ARITHMETIC - {operator.getitem})) and not node.all_input_nodes:
            replace(node, node.target(*node.args, **node.kwargs))
        elif is_call(node, torch._assert) and node.args[0] is True:
            gm.graph.erase_node(node)
    return finish(gm)
