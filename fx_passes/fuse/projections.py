"""Linears that read the same input become one wider linear, whose result is looked at in slices.

    Before: q = linear(x, wq, bq); k = linear(x, wk, bk); v = linear(x, wv, bv)
    After:  wide = linear(x, concat(wq, wk, wv), concat(bq, bk, bv)); q = wide[..., :n], ...

Who sees the strides of a result (outside of the graph, or an operation that is not known) gets a copy without gaps.
Only where each result is reshaped or moved next: a result that an element-wise operation reads absorbs that as a
post-op, which is worth more. The wide weight is a constant subgraph: the parameters keep their names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.graph.graph import finish, get_attribute, is_call, only_values_count

_MAX_GROUP = 8


def fuse_projections(gm: fx.GraphModule) -> fx.GraphModule:
    """Fuse every group of two and more."""
    for group in find_groups(gm):
        widen(gm, group)
    return finish(gm)


def find_groups(gm: fx.GraphModule) -> list[list[fx.Node]]:
    """Groups of linears with one input and constant weights of one dtype and depth, in graph order."""
    groups: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=ops.linear):
        weight = _parameter(gm, node.args[1])
        if weight is None or node.kwargs["post_ops"] or not _is_moved(node) or not isinstance(node.args[0], fx.Node):
            continue
        if node.args[2] is not None and _parameter(gm, node.args[2]) is None:
            continue
        groups.setdefault((node.args[0], weight.dtype, weight.shape[1]), []).append(node)
    return [group for group in groups.values() if 2 <= len(group) <= _MAX_GROUP]


def _parameter(gm: fx.GraphModule, node: Any) -> torch.Tensor | None:
    """The tensor of a get_attr node that nothing writes to."""
    if not isinstance(node, fx.Node) or node.op != "get_attr" or not node.meta.get("constant"):
        return None
    value = get_attribute(gm, node.target)
    return value if isinstance(value, torch.Tensor) and value.ndim in (1, 2) else None


def _is_moved(node: fx.Node) -> bool:
    """Whether only reshapes and such read the result."""
    shapes = ops.SHAPE | ops.MOVEMENT
    return bool(node.users) and all(is_call(user, *shapes) for user in node.users)


def widen(gm: fx.GraphModule, group: list[fx.Node]) -> None:
    """Put one linear in place of the first of group, and slices of it in place of all."""
    graph, first = gm.graph, group[0]
    src = first.args[0]
    sizes = [get_attribute(gm, node.args[1].target).shape[0] for node in group]
    for node in group:  # their parameters may stand further down
        for source in node.args[1:3]:
            if isinstance(source, fx.Node):
                first.prepend(source)
    with graph.inserting_before(first):
        weight = graph.call_function(ops.concat, (tuple(node.args[1] for node in group), 0))
        bias = None
        if any(node.args[2] is not None for node in group):
            rows = [node.args[2] or graph.call_function(ops.no_bias, (node.args[1],)) for node in group]
            bias = graph.call_function(ops.concat, (tuple(rows), 0))
        wide = graph.call_function(ops.linear, (src, weight, bias), {"post_ops": ()})
        wide.meta["source"] = "; ".join(str(node.meta.get("source", node.name)) for node in group)
        start, pieces = 0, []
        for node, size in zip(group, sizes, strict=True):
            piece = graph.call_function(ops.narrow, (wide, -1, start, start + size))
            if not only_values_count(node):  # somebody sees its strides: those of a tensor of its own
                piece = graph.call_function(ops.contiguous, (piece,))
            pieces.append(piece)
            start += size
    value = first.meta.get("val")
    if isinstance(value, torch.Tensor):
        wide.meta["val"] = value.new_empty((*value.shape[:-1], start))
    for node, piece in zip(group, pieces, strict=True):
        if "val" in node.meta:
            piece.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(piece)
        graph.erase_node(node)
