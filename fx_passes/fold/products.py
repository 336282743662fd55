"""Products with a constant matrix are linear layers, whose weights are packed once.

Before: matmul(x, w)                     w [K, N] a parameter, or computed from parameters alone
After:  linear(x, transpose(w, 0, 1))
"""

from __future__ import annotations

from torch import fx

from fx_passes import ops
from fx_passes.graph.graph import finish, is_constant
from fx_passes.graph.inference import rank


def fold_products(gm: fx.GraphModule) -> fx.GraphModule:
    """Respell every product of a run-time value with a constant matrix."""
    for node in gm.graph.find_nodes(op="call_function", target=ops.matmul):
        value, matrix = node.args
        if is_constant(matrix) and not is_constant(value) and rank(matrix) == 2:
            with gm.graph.inserting_before(node):
                weight = gm.graph.call_function(ops.transpose, (matrix, 0, 1))
            node.target, node.args = ops.linear, (value, weight, None)
    return finish(gm)
