"""Recognise a key-value cache that grows by what a step adds, and the attention over it.

Before: attention(q, concat((past_k, k), -2), concat((past_v, v), -2), mask)       past_* [B, H, S, D], S free
After:  cached_attention(q, grow(past_k, k, -2), grow(past_v, v, -2), mask)

Needs sizes that are free in the traced graph: where S is a number, a region is lowered for it like for any other.
Grouped heads that are repeated before the attention (past_* of fewer heads than q) are read where they lie.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.graph.free_sizes import free_symbols, known_sizes, symbols
from fx_passes.graph.graph import argument, finish, is_call, nodes_in, only_user

_ALONG = -2  # of [B, H, S, D]
_NO_END = 1 << 62  # where slices without an end are made to end


def fuse_caches(gm: fx.GraphModule) -> fx.GraphModule:
    """Rewrite every attention over caches that are results of the graph as well."""
    known = known_sizes(gm)
    if known is None:
        return gm
    for node in gm.graph.find_nodes(op="call_function", target=ops.attention):
        if (match := match_cached(node, known)) is not None:
            keys, values, grouped = match
            for cache in {keys: None, values: None}:
                if cache.target is ops.concat:
                    cache.target, cache.args = ops.grow, (*cache.args[0], _ALONG)
            node.target = ops.cached_attention
            node.args = (node.args[0], keys, values, *node.args[3:])
            if grouped:
                node.kwargs = {**node.kwargs, "enable_gqa": True}
    return finish(gm)


def match_cached(node: fx.Node, known: set[Any]) -> tuple[fx.Node, fx.Node, bool] | None:
    """(keys, values, whether their heads were repeated) of an attention over growing caches."""
    if len(node.args) < 3 or symbols(node) - known or symbols(node.args[0]) - known:
        return None
    mask = argument(node, 3, "mask")
    if isinstance(mask, fx.Node) and not _grows_along(mask, -1, known):
        return None
    repeated = [_repeated_heads(operand) for operand in node.args[1:3]]
    keys, values = (before or operand for before, operand in zip(repeated, node.args[1:3], strict=True))
    if not (_is_cache(keys, known) and _is_cache(values, known)) or (repeated[0] is None) != (repeated[1] is None):
        return None
    return keys, values, repeated[0] is not None


def _is_cache(node: Any, known: set[Any]) -> bool:
    """Whether node is what a step leaves of a cache: a result of the graph, the cache before with something behind."""
    if not isinstance(node, fx.Node) or not any(user.op == "output" for user in node.users):
        return False
    if is_call(node, ops.grow):
        return bool(node.args[2] == _ALONG)
    if not is_call(node, ops.concat) or len(node.args[0]) != 2 or len(nodes_in(node.args[0])) != 2:
        return False
    (past, new), value = node.args[0], node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.ndim != 4 or node.args[1] % 4 != _ALONG % 4:
        return False
    same_dtype = all(n.meta["val"].dtype == value.dtype for n in (past, new) if "val" in n.meta)
    return same_dtype and past is not new and _grows_along(past, _ALONG, known) and not symbols(new) - known


def _grows_along(node: fx.Node, dim: int, known: set[Any]) -> bool:
    """Whether one dimension of node has a size that is not known, and only that one."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.ndim < 2:
        return False
    free = [bool(free_symbols(size) - known) for size in value.shape]
    return free.pop(dim) and not any(free)


def _repeated_heads(node: Any) -> fx.Node | None:
    """x where node repeats each head of x [B, G, S, D]: reshape(expand(x[:, :, None], [B, G, R, S, D]))."""
    if not is_call(node, ops.reshape) or only_user(node) is None:
        return None
    expanded = _source(node)
    if not is_call(expanded, ops.expand):
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
    return x if heads[1] == wide[1] * wide[2] and given[1] == wide[1] else None


def _source(node: fx.Node, *, alone: bool = True) -> fx.Node | None:
    """What node moves, slices that leave everything left out; None where something else reads it (alone)."""
    source = node.args[0]
    while is_call(source, ops.narrow) and _is_whole(source):
        if only_user(source) is None:
            return None
        source = source.args[0]
    return source if isinstance(source, fx.Node) and not (alone and only_user(source) is None) else None


def _is_whole(narrow: fx.Node) -> bool:
    """Whether a slice leaves everything."""
    _, _, start, stop = narrow.args
    return start in (0, None) and (stop is None or (type(stop) is int and stop >= _NO_END))


def _inserts_third(node: fx.Node) -> bool:
    """Whether node is x[:, :, None], in any spelling."""
    if is_call(node, ops.unsqueeze):
        return node.args[1] in (2, -3)
    item = node.args[1] if is_call(node, ops.index) else None
    if not isinstance(item, tuple) or len(item) < 3 or item[2] is not None:
        return False
    return all(entry == slice(None) for i, entry in enumerate(item) if i != 2)
