"""Writes to a key-value cache of a fixed size become vocabulary, so that a region goes on across them.

Before: cache.index_copy_(dim, index, new) ... attention(q, cache, ...)            cache an input of the graph, or zeros
After:  written = ops.write_at(cache, index, new, dim) ... attention(q, written, ...)

The cache must be written to once, and be read afterwards alone: then a region may repeat the write without harm, and
what it reads tells the order. A decoder has one region for all layers so, where it had one for each.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import argument, constant_nodes, finish, is_call, is_shape

_SIZES = ("size", "numel", "stride", "dim", "ndimension", "sym_size", "sym_numel", "sym_stride", "getattr")
_FUNCTIONS = (torch.ops.aten.index_copy_.default, torch.Tensor.index_copy_)


def spell_cache_writes(gm: fx.GraphModule) -> fx.GraphModule:
    """Respell every write to an input, or to zeros, that nothing reads before.

    Before normalize, so that views of what is written are vocabulary.
    """
    found = [node for node in gm.graph.nodes if _is_index_copy(node)]
    if not found:
        return gm
    aliasing, constants = Aliasing(gm), constant_nodes(gm.graph)
    for node in found:
        arguments = match_write(node, aliasing, constants)
        if arguments is not None:
            _respell(node, arguments)
    return finish(gm)


def match_write(
    node: fx.Node, aliasing: Aliasing, constants: Container[fx.Node]
) -> tuple[fx.Node, fx.Node, fx.Node, int] | None:
    """(cache, index, new, dim) of a write that may become vocabulary."""
    cache = node.args[0]
    dim, index, new = (argument(node, place, name) for place, name in ((1, "dim"), (2, "index"), (3, "source")))
    if not all(isinstance(each, fx.Node) for each in (cache, index, new)) or type(dim) is not int:
        return None
    if index in constants or new in constants:
        return None
    value = cache.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    if cache.op != "placeholder" and not is_call(cache, torch.zeros, torch.ops.aten.zeros.default):
        return None  # zeros: the first call of a model makes its caches
    if aliasing.writers_of(cache) != [node]:
        return None
    readers = [reader for reader in aliasing.readers(cache) if reader is not node and not asks_size(reader)]
    if any(aliasing.order[reader] < aliasing.order[node] for reader in readers):
        return None
    return cache, index, new, dim


def _is_index_copy(node: fx.Node) -> bool:
    return (node.op == "call_method" and node.target == "index_copy_") or is_call(node, *_FUNCTIONS)


def asks_size(node: fx.Node) -> bool:
    """Whether node asks for something about a tensor that no write changes."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "").partition(".")[0]
    if is_shape(node):
        return True
    return name in _SIZES and "val" in node.meta and not isinstance(node.meta["val"], torch.Tensor)


def _respell(node: fx.Node, arguments: tuple[Any, ...]) -> None:
    """Let node be vocabulary, and everybody else read what it returns."""
    cache = arguments[0]
    node.meta.setdefault("source", str(node.target))
    node.op, node.target, node.args, node.kwargs = "call_function", ops.write_at, arguments, {}
    node.meta["val"] = cache.meta["val"]
    cache.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node and not asks_size(user))
