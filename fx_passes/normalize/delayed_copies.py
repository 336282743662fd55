"""Copies into inputs wait for the end of the graph, so that a region goes on across them.

Before: cache.copy_(new) ... attention(q, cache, ...)              cache an input of the graph
After:  attention(q, new, ...) ... cache.copy_(new)

The copy must be all that is written to the input. Then the input has the numbers that were copied from there on.
"""

from __future__ import annotations

import torch
from torch import fx

from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import argument, example, finish, is_call
from fx_passes.normalize.cache_writes import asks_size

_FUNCTIONS = (torch.Tensor.copy_, torch.ops.aten.copy_.default)


def delay_copies(gm: fx.GraphModule) -> fx.GraphModule:
    """Let every such copy be among the last operations, and let those who read the input read what is copied."""
    found = [node for node in gm.graph.nodes if _is_copy(node)]
    if not found:
        return gm
    aliasing = Aliasing(gm)
    output = next(iter(gm.graph.find_nodes(op="output")))
    for node in [node for node in found if may_wait(node, aliasing)]:
        _delay(node, output, aliasing)
    return finish(gm)


def may_wait(node: fx.Node, aliasing: Aliasing) -> bool:
    """Whether nobody can tell a copy from one at the end."""
    cache, new = node.args[0], argument(node, 1, "src")
    if not isinstance(cache, fx.Node) or not isinstance(new, fx.Node) or cache.op not in ("placeholder", "get_attr"):
        return False
    members = aliasing.members(cache)
    if aliasing.writers_of(cache) != [node] or new in members or aliasing.is_written_after(new, node):
        return False
    if any(other.op in ("placeholder", "get_attr") for other in members if other is not cache):
        return False
    now = aliasing.order[node]
    for other in members:
        readers = [user for user in other.users if aliasing.order[user] > now and not asks_size(user)]
        is_view = other not in (cache, node)
        if is_view and readers and (aliasing.order[other] < now or any(user.op == "output" for user in readers)):
            return False
    return _is_alike(cache, new) or not any(_readers_after(node, aliasing))


def _is_copy(node: fx.Node) -> bool:
    return (node.op == "call_method" and node.target == "copy_") or is_call(node, *_FUNCTIONS)


def _is_alike(cache: fx.Node, new: fx.Node) -> bool:
    """Whether who reads new cannot tell it from cache: sizes, strides and dtype are the same."""
    first, second = example(cache), example(new)
    if first is None or second is None:
        return False
    pairs = ((v.shape, v.stride()) for v in (first, second))
    same = len({str(each) for each in pairs}) == 1  # as text: comparing symbolic sizes would make conditions of them
    return same and first.dtype == second.dtype and first.device == second.device


def _readers_after(node: fx.Node, aliasing: Aliasing) -> list[fx.Node]:
    """Who reads the input, or what the copy returns, from the copy on; the output hands on the input itself."""
    readers = dict.fromkeys((*node.args[0].users, *node.users))
    return [user for user in readers if user.op != "output" and aliasing.order[user] > aliasing.order[node]]


def _delay(node: fx.Node, output: fx.Node, aliasing: Aliasing) -> None:
    cache, new = node.args[0], argument(node, 1, "src")
    for reader in _readers_after(node, aliasing):
        for old in (cache, node):
            reader.replace_input_with(old, new)
    output.replace_input_with(node, cache)
    output.prepend(node)
