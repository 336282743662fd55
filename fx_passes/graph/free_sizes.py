"""What has another size in each step of decoding: the key-value cache, and what reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.graph.graph import argument, is_call

CACHED = frozenset({ops.grow, ops.cached_attention})


def growing_nodes(gm: fx.GraphModule) -> set[fx.Node]:
    """Nodes of a decoding step that have another shape in each step, and those that read one.

    Sizes that no linear or convolution has would make each call a new signature of the region, whose products could do
    with one; outside, the regions around stay as they are. The operations made for it (CACHED) may be in a region.
    """
    known = known_sizes(gm)
    if known is None:
        return set()
    return {
        node
        for node in gm.graph.nodes
        if node.op == "call_function"
        and node.target not in CACHED
        and any(symbols(n) - known for n in (node, *node.all_input_nodes))
    }


def known_sizes(gm: fx.GraphModule) -> set[Any] | None:
    """The free sizes that a linear, a convolution or the batch has, or a cache that is written to and does not grow.

    None where sizes are unknown, or nothing linear.
    """
    linears = gm.graph.find_nodes(op="call_function", target=ops.linear)
    if not linears or any("val" not in node.meta for node in linears):
        return None
    inputs = gm.graph.find_nodes(op="placeholder")
    convolutions = [n for n in gm.graph.nodes if is_call(n, ops.convolution, ops.deconvolution)]
    writes = [n for node in gm.graph.nodes if is_call(node, *ops.WRITING) for n in (node, *node.all_input_nodes)]
    return set().union(*map(symbols, (*linears, *convolutions, *writes)), *map(_batch, inputs))


def _batch(node: fx.Node) -> set[Any]:
    """The free symbols in the first size of an input: nothing grows along the batch (perhaps always 1)."""
    value = node.meta.get("val")
    first = value.shape[0] if isinstance(value, torch.Tensor) and value.ndim > 1 else None
    return set(first.node.expr.free_symbols) if isinstance(first, torch.SymInt) else set()


def symbols(node: fx.Node) -> set[Any]:
    """The free sizes of a value, or in a number."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return {symbol for s in sizes for symbol in free_symbols(s)}


def free_symbols(size: Any) -> set[Any]:
    """The free symbols of one size."""
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def growing_inputs(graph: fx.Graph) -> dict[fx.Node, int]:
    """The inputs of a region that may have another size in each call, and the dimension (below 0) along which.

    Those that CACHED operations alone read, as what grows: everything else in the region is the same for all sizes.
    """
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        dims = {_grows_along(node, user) for user in node.users}
        if len(dims) == 1 and (dim := dims.pop()) is not None:
            found[node] = dim
    return found


def _grows_along(node: fx.Node, user: fx.Node) -> int | None:
    """The dimension along which `user` lets its operand node grow, counted from the end; None where it does not."""
    if user.all_input_nodes.count(node) != 1:
        return None
    if is_call(user, ops.grow) and user.args[0] is node:
        return int(user.args[2])
    if is_call(user, ops.cached_attention):
        if node in (argument(user, 1, "key"), argument(user, 2, "value")):
            return -2
        return -1 if argument(user, 3, "mask") is node else None
    return None
