"""Whose strides somebody outside the vocabulary can see: at the values themselves, or at what is computed of them."""

from __future__ import annotations

import operator

from torch import fx

from fx_passes import ops
from fx_passes.graph.graph import is_call, is_shape, is_vocabulary


def strides_seen(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose strides reach the output or plain PyTorch, which may ask for them, or view by them.

    Most operations lay their result out as their operand lies: a convolution of channels-last numbers is channels-last.
    """
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_piece = is_call(node, operator.getitem) and is_call(node.args[0], *ops.SEVERAL)
        if is_vocabulary(node) or is_piece:
            hands_on = node in seen and not is_call(node, *ops.ROW_MAJOR)
        else:
            hands_on = not is_shape(node)
        if hands_on:
            seen.update(node.all_input_nodes)
    return seen
