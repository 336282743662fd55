"""Let values be quantized where they are computed, before views of them.

    Before: linear -> reshape -> permute -> quantize -> dequantize -> matmul           (heads of an attention)
    After:  linear -> quantize -> dequantize -> reshape -> permute -> matmul

What computes a value then writes integers, and the views are views of these. Products of one value with several
weights, which would become one wider product, stay apart so: what copies its slices costs more than they gain.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import finish, is_call, is_constant

# Not parts: the rest of the value may have other readers
_VIEWS = (ops.having(view=True) | {ops.roll}) - {ops.narrow, ops.index, ops.reshape_as}


def quantize_before_views(gm: fx.GraphModule) -> fx.GraphModule:
    """Move each constant scale for a whole value before the views, and rolls, that only it reads."""
    aliasing = Aliasing(gm)
    for node in gm.graph.find_nodes(op="call_function", target=ops.quantize):
        views = _views_of(node)
        if views and not aliasing.is_written_between(views, views[-1].args[0], node):
            _move(node, views)
    return finish(gm)


def _views_of(node: fx.Node) -> list[fx.Node]:
    """The views between node, an ops.quantize, and what is computed, the last first; those that it alone reads."""
    if node.args[3] is not None or not is_constant(node.args[1:3]) or not node.users:
        return []
    if not all(is_call(reader, ops.dequantize) and reader.args[3] is None for reader in node.users):
        return []
    views: list[fx.Node] = []
    reader, source = node, node.args[0]
    while is_call(source, *_VIEWS) and list(source.users) == [reader]:
        views.append(source)
        reader, source = source, source.args[0]
    return views if isinstance(source, fx.Node) and source.op == "call_function" else []


def _move(node: fx.Node, views: list[fx.Node]) -> None:
    graph, source = node.graph, views[-1].args[0]
    with graph.inserting_after(source):
        kept = graph.call_function(ops.quantize, (source, *node.args[1:]), node.kwargs)
    _describe(kept, node, source)
    for reader in list(node.users):
        with graph.inserting_before(reader):
            seen = graph.call_function(ops.dequantize, (kept, *reader.args[1:]))
            _describe(seen, reader, source)
            for view in reversed(views):
                there = graph.call_function(view.target, (seen, *view.args[1:]), dict(view.kwargs))
                _describe(there, reader, view)
                seen = there
        reader.replace_all_uses_with(seen)
        graph.erase_node(reader)
    for unread in (node, *views):
        graph.erase_node(unread)


def _describe(made: fx.Node, like: fx.Node, shaped: Any) -> None:
    """made has what is known of like, and the shape of another node."""
    made.meta = dict(like.meta)
    shape, value = shaped.meta.get("val"), made.meta.pop("val", None)
    if shape is not None and value is not None:
        made.meta["val"] = shape.to(value.dtype)
