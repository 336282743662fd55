"""A tensor that is rolled by one place, and written to at its last one, becomes a concatenation.

Before: rolled = cache.roll(-1, -2); rolled[:, :, [-1]] = new         as static caches with a sliding window do
After:  rolled = cat((cache[:, :, 1:], new), -2)

The numbers are the same. Regions know concatenations, and nothing is written in place.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import argument, example, finish, is_call

_ROLLS = (torch.roll, torch.ops.aten.roll.default)
_LAST = slice(-1, None, None)


def spell_rolled_caches(gm: fx.GraphModule) -> fx.GraphModule:
    """Respell every such roll that nobody reads before the write."""
    found = [node for node in gm.graph.nodes if _is_roll(node)]
    if not found:
        return gm
    aliasing = Aliasing(gm)
    for node in found:
        match = match_rolled(node, aliasing)
        if match is not None:
            _respell(node, *match)
    return finish(gm)


def match_rolled(node: fx.Node, aliasing: Aliasing) -> tuple[fx.Node, fx.Node, int] | None:
    """(the write, the slice written, the dimension) of a roll whose first reader writes to its last place."""
    rolled, dim = example(node), argument(node, 2, "dims")
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    if argument(node, 1, "shifts") not in (-1, (-1,), [-1]) or type(dim) is not int:
        return None
    write = min(node.users, key=lambda user: aliasing.order[user], default=None)
    if not is_call(write, operator.setitem) or write.args[0] is not node or write.users:
        return None
    place, new = write.args[1:]
    given = example(new)
    if rolled is None or given is None or given.dtype != rolled.dtype:
        return None
    dim %= rolled.ndim
    wanted = (*rolled.shape[:dim], 1, *rolled.shape[dim + 1 :])
    has_shape = str(wanted) == str((*given.shape,))  # as text: comparing symbolic sizes would make conditions of them
    if not has_shape or not _is_last(place, dim, rolled.ndim) or not aliasing.may_move_down(node, write):
        return None
    return write, new, dim


def _is_roll(node: fx.Node) -> bool:
    return (node.op == "call_method" and node.target == "roll") or is_call(node, *_ROLLS)


def _is_last(place: Any, dim: int, rank: int) -> bool:
    """Whether an index takes the last slice along dim, of size 1, and all of the other dimensions."""
    indices = list(place) if isinstance(place, tuple) else [place]
    if len(indices) == rank and Ellipsis not in indices[:1]:
        indices = indices[: dim + 1] if all(each == slice(None) for each in indices[dim + 1 :]) else []
    if len(indices) != dim + 1 or any(each != slice(None) for each in indices[:-1]):
        return False
    last = indices[-1]
    return last == _LAST or (is_call(last, torch.tensor) and last.args[:1] == ([-1],))


def _respell(node: fx.Node, write: fx.Node, new: fx.Node, dim: int) -> None:
    """Let the concatenation stand where the write was."""
    graph, cache = node.graph, node.args[0]
    with graph.inserting_before(write):
        kept = graph.call_function(operator.getitem, (cache, (*[slice(None)] * dim, slice(1, None, None))))
        joined = graph.call_function(torch.cat, ((kept, new), dim))
    kept.meta["val"] = cache.meta["val"].narrow(dim, 1, cache.meta["val"].shape[dim] - 1)
    joined.meta["val"] = node.meta["val"]
    graph.erase_node(write)
    node.replace_all_uses_with(joined)
    graph.erase_node(node)
