"""Grouped heads: keys and values of which several queries' heads read one.

Models repeat them for attention, which copies a whole cache in each step. Of a single query, the heads of a group are
rows that read one head:

    Before: attention(q, reshape(expand(k[:, :, None])), reshape(expand(v[:, :, None])), mask)    q [B, G * R, 1, D]
    After:  reshape(attention(reshape(q, [B, G, R, D]), k, v, mask), [B, G * R, 1, D])            k, v [B, G, S, D]
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import NO_END, argument, finish, is_call, known_shape, only_user

# Where others than ops.write_at write to the memory, normalize leaves them as they are called.
_NAMES = {ops.reshape: "reshape", ops.expand: "expand", ops.unsqueeze: "unsqueeze", ops.narrow: "slice"}


def fuse_grouped_heads(gm: fx.GraphModule) -> fx.GraphModule:
    """Let attention of single queries read keys and values where they lie, not repeated."""
    aliasing: Aliasing | None = None
    for node in gm.graph.find_nodes(op="call_function", target=ops.attention):
        if (found := match_grouped(node)) is None:
            continue
        aliasing = aliasing or Aliasing(gm)
        if not any(aliasing.is_written_after(x, copied) for x, copied in zip(found, node.args[1:3], strict=True)):
            _read_where_they_lie(gm, node, found)
    return finish(gm) if aliasing else gm


def match_grouped(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Keys and values before they were repeated, of an attention of single queries."""
    query, mask = node.args[0], argument(node, 3, "mask")
    if argument(node, 4, "is_causal", False) or argument(node, 6, "enable_gqa", False) or len(node.args) < 3:
        return None
    shape, of_mask = known_shape(query), known_shape(mask)
    if len(shape) != 4 or shape[2] != 1 or type(shape[1]) is not int or type(shape[3]) is not int:
        return None
    if mask is not None and (len(of_mask) != 4 or of_mask[1] != 1):
        return None
    keys, values = map(repeated_heads, node.args[1:3])
    if keys is None or values is None or known_shape(keys)[:3] != known_shape(values)[:3]:
        return None
    return None if None in (_number(known_shape(keys)[1]), _number(known_shape(values)[3])) else (keys, values)


def _number(size: int | torch.SymInt) -> int | None:
    """A size as a number; None where it is free. TorchDynamo gives some as terms: no argument of a node is one."""
    return size if isinstance(size, int) else size.node.maybe_as_int()


def _read_where_they_lie(gm: fx.GraphModule, node: fx.Node, found: tuple[fx.Node, fx.Node]) -> None:
    query: Any = node.args[0]
    value = query.meta["val"]
    groups, width = _number(known_shape(found[0])[1]), _number(known_shape(found[1])[3])
    heads, d = value.shape[1], value.shape[3]
    assert groups is not None
    with gm.graph.inserting_before(node):
        rows = gm.graph.call_function(ops.reshape, (query, (-1, groups, heads // groups, d)))
        attended = gm.graph.call_function(ops.attention, (rows, *found, *node.args[3:]), dict(node.kwargs))
    rows.meta["val"] = value.new_empty((value.shape[0], groups, heads // groups, d))
    result = node.meta.get("val")
    attended.meta.update(node.meta)
    if isinstance(result, torch.Tensor):
        attended.meta["val"] = result.new_empty((result.shape[0], groups, heads // groups, result.shape[3]))
    repeated = node.args[1:3]
    node.target, node.kwargs = ops.reshape, {}
    node.args = (attended, (-1, heads, 1, width))
    for copied, x in zip(repeated, found, strict=True):
        while copied is not x and isinstance(copied, fx.Node) and not copied.users:
            unread, copied = copied, copied.args[0]
            gm.graph.erase_node(unread)


def _is(node: Any, operation: Callable[..., Any]) -> bool:
    """Whether node calls an operation, as vocabulary, or as the method or operator of its name."""
    if not isinstance(node, fx.Node):
        return False
    name = node.target._opname if isinstance(node.target, torch._ops.OpOverload) else node.target
    return name == _NAMES[operation] or is_call(node, operation)


def repeated_heads(node: Any) -> fx.Node | None:
    """x where node repeats each head of x [B, G, S, D]: reshape(expand(x[:, :, None], [B, G, R, S, D]))."""
    if not _is(node, ops.reshape) or only_user(node) is None:
        return None
    expanded = _source(node)
    if not _is(expanded, ops.expand):
        return None
    inserted = _source(expanded)
    if inserted is None or not _inserts_third(inserted):
        return None
    x = _source(inserted, alone=False)
    values = [n.meta.get("val") if isinstance(n, fx.Node) else None for n in (x, expanded, node)]
    if x is None or any(not isinstance(value, torch.Tensor) for value in values):
        return None
    given, wide, heads = (tuple(value.shape) for value in values if value is not None)
    if (len(given), len(wide), len(heads)) != (4, 5, 4) or not all(type(n) is int for n in (*wide[1:3], heads[1])):
        return None
    is_repeated = heads[1] == wide[1] * wide[2] and given[1] == wide[1]
    return x if is_repeated and str(given[2:]) == str(wide[3:]) == str(heads[2:]) else None


def _source(node: fx.Node, *, alone: bool = True) -> fx.Node | None:
    """What node moves, slices that leave everything left out; None where something else reads it (alone)."""
    source = node.args[0]
    while _is(source, ops.narrow) and _is_whole(source):
        if only_user(source) is None:
            return None
        source = source.args[0]
    return source if isinstance(source, fx.Node) and not (alone and only_user(source) is None) else None


def _is_whole(narrow: fx.Node) -> bool:
    """Whether a slice leaves everything."""
    start, stop, step = (*narrow.args[2:], None, None, None)[:3]
    return start in (0, None) and step in (1, None) and (stop is None or (type(stop) is int and stop >= NO_END))


def _inserts_third(node: fx.Node) -> bool:
    """Whether node is x[:, :, None], in any spelling."""
    if _is(node, ops.unsqueeze):
        return node.args[1] in (2, -3)
    item = node.args[1] if is_call(node, ops.index, operator.getitem) else None
    if not isinstance(item, tuple) or len(item) < 3 or item[2] is not None:
        return False
    return all(entry == slice(None) for i, entry in enumerate(item) if i != 2)
