"""Recognise rotary position embedding where models write it out.

Before: add(mul(x, cos), mul(concat(mul(x[..., h:], -1), x[..., :h]), sin))                 by halves
        add(mul(x, cos), mul(flatten(stack(mul(x[..., 1::2], -1), x[..., ::2])), sin))      by neighbours: GLM, Cohere
After:  rotary(x, cos, sin, interleaved)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.graph.graph import finish, is_call

aten = torch.ops.aten
_END = 2**63 - 1  # as torch.export writes the end of a slice that has none


def fuse_rotary(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace every rotation by halves or by neighbours."""
    for node in gm.graph.find_nodes(op="call_function", target=ops.binary):
        if (match := match_rotary(node)) is not None:
            products = node.all_input_nodes
            node.target, node.args = ops.rotary, match
            _erase_unread(products)
    return finish(gm)


def _erase_unread(nodes: list[fx.Node]) -> None:
    """Take out what made up the rotation, as far as nothing else reads it: torch.stack is no code that finish knows."""
    for node in nodes:
        if not node.users and node.op != "placeholder":
            sources = node.all_input_nodes
            node.graph.erase_node(node)
            _erase_unread(sources)


def match_rotary(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, bool] | None:
    """(x, cos, sin, interleaved) of the sum of x * cos and turned x * sin."""
    a, b, kind = node.args
    if kind != "add" or not (_is_product(a) and _is_product(b)):
        return None
    for plain, product in ((a, b), (b, a)):
        for turned, sin in (product.args[:2], product.args[1::-1]):
            interleaved = not is_call(turned, ops.concat)
            x = _source_of_neighbours(turned) if interleaved else _source_of_halves(turned)
            if x is not None and isinstance(sin, fx.Node) and x in plain.args[:2]:
                cos = plain.args[1] if plain.args[0] is x else plain.args[0]
                return (x, cos, sin, interleaved) if isinstance(cos, fx.Node) else None
    return None


def _is_product(node: Any) -> bool:
    return is_call(node, ops.binary) and node.args[2] == "mul"


def _source_of_neighbours(node: Any) -> fx.Node | None:
    """x where node is stack((-x[..., 1::2], x[..., ::2]), -1) in x's shape."""
    whole = is_call(node, ops.flatten) and tuple(node.args[1:]) == (-2, -1)
    as_x = is_call(node, ops.reshape_as)
    stack = node.args[0] if whole or as_x else None
    if not is_call(stack, torch.stack, aten.stack.default) or stack.kwargs.keys() - {"dim"}:
        return None
    pieces, dim = stack.args[0], stack.kwargs.get("dim", (*stack.args, 0)[1])
    if len(pieces) != 2 or dim != -1 or not _is_product(pieces[0]) or pieces[0].args[1] != -1:
        return None
    odd, even = _every_second(pieces[0].args[0]), _every_second(pieces[1])
    if odd is None or even is None or odd[0] is not even[0] or (odd[1], even[1]) != (1, 0):
        return None
    x = odd[0]
    size = x.meta["val"].shape[-1] if "val" in x.meta else None
    return x if isinstance(size, int) and size % 2 == 0 and (whole or node.args[1] is x) else None


def _every_second(node: Any) -> tuple[fx.Node, int] | None:
    """(x, start) where node is x[..., start::2]."""
    if is_call(node, aten.slice.Tensor) and len(node.args) == 5:
        x, dim, start, stop, step = node.args
        last = "val" in x.meta and dim in (-1, x.meta["val"].ndim - 1)
        return (x, start) if last and step == 2 and type(start) is int and stop == _END else None
    item = _last_item(node)
    return (node.args[0], item.start or 0) if item is not None and item.step == 2 and item.stop is None else None


def _source_of_halves(node: Any) -> fx.Node | None:
    """x where node is concat((-x[..., h:], x[..., :h]), -1) with h half of x's last size."""
    if not is_call(node, ops.concat) or len(node.args[0]) != 2:
        return None
    negative, first = node.args[0]
    value = node.meta.get("val")
    if value is None or node.args[1] not in (-1, value.ndim - 1) or not isinstance(value.shape[-1], int):
        return None
    if not _is_product(negative) or negative.args[1] != -1 or value.shape[-1] % 2:
        return None
    half = value.shape[-1] // 2
    second = negative.args[0]
    low, high = _last_slice(first, value.shape[-1]), _last_slice(second, value.shape[-1])
    if low is None or high is None or low[0] is not high[0]:
        return None
    return low[0] if (low[1:], high[1:]) == ((0, half), (half, 2 * half)) else None


def _last_slice(node: Any, size: int) -> tuple[fx.Node, int, int] | None:
    """(x, start, stop) where node is a slice of x along its last dimension."""
    bounds = node.args[2:] if is_call(node, ops.narrow) else ()
    if any(isinstance(bound, fx.Node) for bound in bounds):
        return None
    if is_call(node, ops.narrow) and node.args[1] in (-1, node.args[0].meta["val"].ndim - 1):
        start, stop, _ = slice(node.args[2], node.args[3]).indices(size)
        return node.args[0], start, stop
    item = _last_item(node)
    if item is not None and item.step in (None, 1):
        start, stop, _ = item.indices(size)
        return node.args[0], start, stop
    return None


def _last_item(node: Any) -> slice | None:
    """The slice s where node is x[..., s], from and to numbers."""
    if not is_call(node, ops.index) or not isinstance(node.args[1], tuple) or len(node.args[1]) != 2:
        return None
    dots, item = node.args[1]
    numbers = isinstance(item, slice) and not any(isinstance(v, fx.Node) for v in (item.start, item.stop))
    return item if dots is Ellipsis and numbers else None
