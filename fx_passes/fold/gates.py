"""Multiply, and add, what is small first: gates of means and norms, with the constants around them.

    Before: x + (b + w * (x * gate))        x [N, C, H, W], gate [N, C, 1, 1], w and b [1, C, 1, 1]
    After:  x * (w * gate + 1) + b

Each operation on x reads and writes all of it: two in place of four. So ConvNeXt V2 normalizes its responses.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import finish, is_call, is_constant, only_user, tensor_of
from fx_passes.graph.inference import dtype
from fx_passes.spellings.registry import is_number


def fold_gates(gm: fx.GraphModule) -> fx.GraphModule:
    """Fold every gate that a constant multiplies, and every gated value that is added to what was gated."""
    aliasing: Aliasing | None = None
    for node in list(gm.graph.find_nodes(op="call_function", target=ops.binary)):
        found = match_factor(node, gm) or match_residual(node, gm)
        if found is None:
            continue
        product, (value, gate), constant = found
        aliasing = aliasing or Aliasing(gm)
        if not aliasing.is_written_between((value, gate), product, node):
            _fold(node, value, gate, constant)
    return finish(gm)


def match_factor(node: fx.Node, gm: fx.GraphModule) -> tuple[fx.Node, tuple[fx.Node, fx.Node], fx.Node] | None:
    """(product, (value, gate), constant) where node is the product of a gated value and a constant of its dtype."""
    for constant, product in _sides(node, "mul"):
        gated = _gated(product, node)
        if gated is not None and _is_like(constant, gated[0], gm) and _spans(gated[1], _wide_dim(constant, gm)):
            return product, gated, constant
    return None


def match_residual(node: fx.Node, gm: fx.GraphModule) -> tuple[fx.Node, tuple[fx.Node, fx.Node], fx.Node] | None:
    """(product, (value, gate), constant) where node adds value to the sum of the product and a constant."""
    for value, total in _sides(node, "add"):
        if not is_call(total, ops.binary) or only_user(total) is not node:
            continue
        for constant, product in _sides(total, "add"):
            gated = _gated(product, total)
            if gated is not None and gated[0] is value and _is_like(constant, value, gm):
                return product, gated, constant
    return None


def _sides(node: fx.Node, kind: str) -> list[tuple[Any, Any]]:
    a, b, found = node.args
    return [(a, b), (b, a)] if found == kind and all(isinstance(each, fx.Node) for each in (a, b)) else []


def _gated(product: Any, reader: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(value, gate) of a product that reader alone reads."""
    if not is_call(product, ops.binary) or only_user(product) is not reader:
        return None
    return next(
        ((value, gate) for value, gate in _sides(product, "mul") if _is_small(gate) and not _is_small(value)), None
    )


def _is_small(node: Any) -> bool:
    """Whether node is computed, element by element, of reductions that keep their dimensions, and of constants."""
    seen, left, reductions = set[Any](), [node], 0
    while left:
        node = left.pop()
        if node in seen or is_number(node) or is_constant(node):
            continue
        seen.add(node)
        if is_call(node, ops.reduce) and node.args[3] is True:
            reductions += 1
        elif is_call(node, ops.eltwise):
            left.append(node.args[0])
        elif is_call(node, ops.binary):
            left += node.args[:2]
        else:
            return False
    return reductions > 0


def _spans(gate: Any, dim: tuple[int, int]) -> bool:
    """Whether a gate has numbers of its own along a dimension, which is given from the front and from the end.

    The constants make another one large: in RMSNorm a number of each row meets one for each column.
    """
    left = [gate]
    while left:
        node = left.pop()
        if is_call(node, ops.reduce):
            if not set(dim).intersection(node.args[2]) and (not _is_small(node.args[0]) or _spans(node.args[0], dim)):
                return True
        elif is_call(node, ops.eltwise):
            left.append(node.args[0])
        elif is_call(node, ops.binary):
            left += node.args[:2]
    return False


def _wide_dim(constant: fx.Node, gm: fx.GraphModule) -> tuple[int, int]:
    """The dimension along which a constant has several numbers, from the front and from the end."""
    shape = constant.args[1] if is_call(constant, ops.reshape) else None
    if shape is None:
        tensor = tensor_of(gm, constant)
        shape = (1,) if tensor is None else tensor.shape
    wide = next((dim for dim, size in enumerate(shape) if size != 1), 0)
    return wide, wide - len(shape)


def _is_like(constant: Any, value: fx.Node, gm: fx.GraphModule) -> bool:
    """Whether it is a constant of as many numbers as it has channels, at the most, and of value's dtype."""
    if not is_constant(constant):
        return False
    while is_call(constant, ops.reshape, ops.unsqueeze):
        constant = constant.args[0]
    if (tensor := tensor_of(gm, constant)) is None or tensor.numel() != max(tensor.shape, default=1):
        return False
    return dtype(value, gm) == tensor.dtype


def _fold(node: fx.Node, value: fx.Node, gate: fx.Node, constant: fx.Node) -> None:
    graph, kind = node.graph, node.args[2]
    with graph.inserting_before(node):
        if kind == "mul":
            small = graph.call_function(ops.binary, (gate, constant, "mul"))
            node.args = (value, small, "mul")
        else:
            small = graph.call_function(ops.binary, (gate, 1, "add"))
            product = graph.call_function(ops.binary, (value, small, "mul"))
            product.meta |= {name: node.meta[name] for name in ("val", "source") if name in node.meta}
            node.args = (product, constant, "add")
    if "source" in node.meta:
        small.meta["source"] = node.meta["source"]
