"""Recognise rotary position embedding where models write it out.

Before: add(mul(x, cos), mul(concat(mul(x[..., h:], -1), x[..., :h]), sin))
After:  rotary(x, cos, sin)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fx_passes import ops
from fx_passes.graph import finish, is_call


def fuse_rotary(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace every rotation by halves."""
    for node in gm.graph.find_nodes(op="call_function", target=ops.binary):
        if (match := match_rotary(node)) is not None:
            node.target, node.args = ops.rotary, match
    return finish(gm)


def match_rotary(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(x, cos, sin) of the sum of x * cos and rotated x * sin."""
    a, b, kind = node.args
    if kind != "add" or not (_is_product(a) and _is_product(b)):
        return None
    for plain, turned in ((a, b), (b, a)):
        for rotated, sin in (turned.args[:2], turned.args[1::-1]):
            x = _rotated_source(rotated)
            if x is not None and isinstance(sin, fx.Node) and x in plain.args[:2]:
                cos = plain.args[1] if plain.args[0] is x else plain.args[0]
                return (x, cos, sin) if isinstance(cos, fx.Node) else None
    return None


def _is_product(node: Any) -> bool:
    return is_call(node, ops.binary) and node.args[2] == "mul"


def _rotated_source(node: Any) -> fx.Node | None:
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
    if is_call(node, ops.index) and isinstance(node.args[1], tuple) and len(node.args[1]) == 2:
        dots, item = node.args[1]
        numbers = isinstance(item, slice) and not any(isinstance(v, fx.Node) for v in (item.start, item.stop))
        if dots is Ellipsis and numbers and item.step in (None, 1):
            start, stop, _ = item.indices(size)
            return node.args[0], start, stop
    return None
