"""Write out vmap of element-wise operations: with the mapped dimension in front they compute the same numbers.

Before: _vmap_increment_nesting -> _add_batch_dim(x, 0, 1) -> mul -> _remove_batch_dim -> _vmap_decrement_nesting
After:  mul

TorchDynamo leaves such parts of `associative_scan`, a state space's steps, two for each halving of its length.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx
from torch._functorch import predispatch

from fx_passes.graph.graph import example, set_example

_ENTER, _LEAVE = predispatch._vmap_increment_nesting, predispatch._vmap_decrement_nesting
_MAP, _UNMAP = predispatch._add_batch_dim, predispatch._remove_batch_dim
_ELEMENTWISE = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg,
    torch.add, torch.sub, torch.mul, torch.div, torch.neg, torch.exp, torch.maximum, torch.minimum,
}  # fmt: skip


def write_out_map(graph: fx.Graph, part: Sequence[fx.Node]) -> bool:
    """Replace part, calls from where a map is entered to where it is left, by what it computes; whether it could be.

    It can where all tensors inside are mapped by their first dimension and have one rank: then none broadcasts over it.
    """
    first, *inside, last = part
    if first.target is not _ENTER or last.target is not _LEAVE or first.users or last.users:
        return False
    mapped = [value for node in inside if node.target is _MAP and (value := example(node.args[0])) is not None]
    members = set(inside)
    if len({value.ndim for value in mapped}) != 1 or not all(_may_stand_alone(node, members) for node in inside):
        return False
    for node in inside:
        if node.target in (_MAP, _UNMAP):
            node.replace_all_uses_with(node.args[0])
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            set_example(node, node.target(*args, **kwargs))
    before = first.prev
    for node in (last, *reversed(inside), first):
        if node.target not in _ELEMENTWISE:
            graph.erase_node(node)
    if before.target is predispatch.lazy_load_decompositions and not before.users:
        graph.erase_node(before)
    return True


def _may_stand_alone(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether node, of a map, maps or unmaps by dimension 0, or is element-wise on what is mapped and on numbers."""
    if node.kwargs and node.target in (_MAP, _UNMAP):
        return False
    if node.target is _MAP:
        return node.args[1] == 0 and example(node.args[0]) is not None and node.args[0] not in inside
    if node.target is _UNMAP:
        return node.args[3] == 0 and node.args[0] in inside and node.args[0].target in _ELEMENTWISE
    if node.op != "call_function" or node.target not in _ELEMENTWISE or any(user not in inside for user in node.users):
        return False
    return inside.issuperset(node.all_input_nodes) and not any(n.target is _UNMAP for n in node.all_input_nodes)
