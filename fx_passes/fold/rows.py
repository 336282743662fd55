"""Linear layers of rows, as decompositions spell those of more dimensions, are layers of what the rows are of.

Before: reshape(linear(reshape(x, (-1, K)), w, b), (*sizes of x but K, N))
After:  linear(x, w, b)

What follows is then behind the layer itself, which may absorb it.
Needs:  meta["val"]; nodes without it stay as they are
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import example, finish, is_call, only_user, replace


def fold_rows(gm: fx.GraphModule) -> fx.GraphModule:
    """Respell every such layer whose rows nobody else reads."""
    aliasing = Aliasing(gm)
    for node in gm.graph.find_nodes(op="call_function", target=ops.linear):
        source, result = rows_of(node.args[0]), only_user(node)
        if source is None or result is None or not restores(result, source) or aliasing.is_written(source):
            continue
        node.args = (source, *node.args[1:])
        node.meta["val"] = result.meta["val"]
        replace(result, node)
    return finish(gm)


def rows_of(node: Any) -> fx.Node | None:
    """The value whose rows node has as a matrix; None where it is none."""
    if not is_call(node, ops.reshape, ops.flatten):
        return None
    have, want = shape_of(node.args[0]), shape_of(node)
    if have is None or want is None or len(want) != 2 or len(have) < 2 or not same_sizes(have[-1:], want[-1:]):
        return None
    source: fx.Node = node.args[0]
    return source


def restores(node: Any, source: fx.Node) -> bool:
    """Whether node gives rows the shape that source has, but for the last dimension."""
    have, want = shape_of(source), shape_of(node)
    if not is_call(node, ops.reshape) or have is None or want is None:
        return False
    rows = shape_of(node.args[0])
    return rows is not None and same_sizes(rows[-1:], want[-1:]) and same_sizes(have[:-1], want[:-1])


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether sizes are equal for all inputs: numbers, or free sizes of one expression."""
    return len(a) == len(b) and all(_size(x) == _size(y) for x, y in zip(a, b, strict=True))


def _size(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """The shape of a node's example; None where it has none."""
    value = example(node)
    return None if value is None else tuple(value.shape)
