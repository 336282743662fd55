"""A tensor that is rolled by one place, and written to at its last one, becomes a concatenation.

Before: rolled = cache.roll(-1, -2); rolled[:, :, [-1]] = new         as static caches with a sliding window do
        (exported: index_put_, or copy_ to a slice)
After:  rolled = cat((cache[:, :, 1:], new), -2)

The numbers are the same. Regions know concatenations, and nothing is written in place.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import NO_END, argument, example, finish, is_call, only_user, tensor_of

aten = torch.ops.aten
_ROLLS = (torch.roll, aten.roll.default)
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
    found = _first_write(node, aliasing)
    if found is None:
        return None
    write, place, new = found
    given = example(new)
    if rolled is None or given is None or given.dtype != rolled.dtype:
        return None
    dim %= rolled.ndim
    wanted = (*rolled.shape[:dim], 1, *rolled.shape[dim + 1 :])
    left_out = rolled.ndim - given.ndim  # dimensions of size 1 in front, which PyTorch takes out of what is written
    has_shape = str(wanted) == str((*[1] * left_out, *given.shape))  # as text: symbolic sizes would become conditions
    if not has_shape or not _is_last(place, dim, rolled.ndim) or not aliasing.may_move_down(node, write):
        return None
    return write, new, dim


def _first_write(node: fx.Node, aliasing: Aliasing) -> tuple[fx.Node, Any, Any] | None:
    """(the write, the place, what is written) where the first reader of node writes to it, in any spelling."""
    first, *others = sorted(node.users, key=aliasing.order.__getitem__) or (None,)
    if is_call(first, operator.setitem) and first.args[0] is node and not first.users:
        return first, *first.args[1:]
    adds = is_call(first, aten.index_put_.default) and argument(first, 3, "accumulate", False)
    if is_call(first, aten.index_put_.default) and first.args[0] is node and not adds:
        return first, tuple(slice(None) if each is None else each for each in first.args[1]), first.args[2]
    if not is_call(first, aten.slice.Tensor) or (write := only_user(first)) is None or write.users:
        return None
    dim, start, stop, step = (*first.args[1:], None, None, None)[:4]  # a view of the last places, and a copy there
    if not is_call(write, aten.copy_.default) or write.args[0] is not first or type(dim) is not int or dim < 0:
        return None
    if any(aliasing.order[other] < aliasing.order[write] for other in others) or step not in (None, 1):
        return None
    end = None if stop is None or (type(stop) is int and stop >= NO_END) else stop
    return write, (*[slice(None)] * dim, slice(start, end, None)), write.args[1]


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
    return last == _LAST or (is_call(last, torch.tensor) and last.args[:1] == ([-1],)) or _is_literal(last)


def _is_literal(node: Any) -> bool:
    """Whether node is torch.tensor([-1]) of a forward, as torch.export writes it."""
    if not is_call(node, aten.lift_fresh_copy.default) or (owner := node.graph.owning_module) is None:
        return False
    value = tensor_of(owner, node.args[0])
    return value is not None and value.tolist() == [-1]


def _respell(node: fx.Node, write: fx.Node, new: fx.Node, dim: int) -> None:
    """Let the concatenation stand where the write was."""
    graph, cache, view = node.graph, node.args[0], write.args[0]
    with graph.inserting_before(write):
        for _ in range(node.meta["val"].ndim - new.meta["val"].ndim):
            value = new.meta["val"].unsqueeze(0)
            new = graph.call_function(aten.unsqueeze.default, (new, 0))
            new.meta["val"] = value
        kept = graph.call_function(operator.getitem, (cache, (*[slice(None)] * dim, slice(1, None, None))))
        joined = graph.call_function(torch.cat, ((kept, new), dim))
    kept.meta["val"] = cache.meta["val"].narrow(dim, 1, cache.meta["val"].shape[dim] - 1)
    joined.meta["val"] = node.meta["val"]
    write.replace_all_uses_with(joined)  # it returns what it writes to
    graph.erase_node(write)
    if view is not node:
        graph.erase_node(view)
    node.replace_all_uses_with(joined)
    graph.erase_node(node)
