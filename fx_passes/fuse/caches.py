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
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.fuse.grouped_heads import repeated_heads
from fx_passes.graph.free_sizes import free_symbols, known_sizes, symbols
from fx_passes.graph.graph import argument, finish, is_call, nodes_in

_ALONG = -2  # of [B, H, S, D]


def fuse_caches(gm: fx.GraphModule) -> fx.GraphModule:
    """Rewrite every attention over caches that are results of the graph as well."""
    known = known_sizes(gm)
    if known is None:
        return gm
    aliasing: Aliasing | None = None
    for node in gm.graph.find_nodes(op="call_function", target=ops.attention):
        if (match := match_cached(node, known)) is not None:
            keys, values, grouped = match
            aliasing = aliasing or Aliasing(gm)
            repeated = zip((keys, values), node.args[1:3], strict=True) if grouped else ()
            if any(aliasing.is_written_between((cache,), copied, node) for cache, copied in repeated):
                continue
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
    if isinstance(mask, fx.Node) and not grows_along(mask, -1, known):
        return None
    repeated = [repeated_heads(operand) for operand in node.args[1:3]]
    keys, values = (before or operand for before, operand in zip(repeated, node.args[1:3], strict=True))
    if not (is_cache(keys, known) and is_cache(values, known)) or (repeated[0] is None) != (repeated[1] is None):
        return None
    return keys, values, repeated[0] is not None


def is_cache(node: Any, known: set[Any]) -> bool:
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
    return same_dtype and past is not new and grows_along(past, _ALONG, known) and not symbols(new) - known


def grows_along(node: fx.Node, dim: int, known: set[Any]) -> bool:
    """Whether one dimension of node has a size that is not known, and only that one."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.ndim < 2:
        return False
    free = [bool(free_symbols(size) - known) for size in value.shape]
    return free.pop(dim) and not any(free)
