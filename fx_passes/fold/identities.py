"""Remove what changes nothing: copies whose strides nobody sees, empty borders, and repeated activations.

Before: transpose -> contiguous -> reshape      relu -> relu    abs -> relu     concat((x,))    x * 1   x[:, :]
After:  transpose -> reshape                    relu            abs             x               x       x
"""

from __future__ import annotations

import torch
from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import NO_END, finish, is_call, only_values_count, replace
from fx_passes.graph.strides import strides_seen

_FROM_ZERO = frozenset(("relu", "clamp_min"))
_BOUNDED = frozenset(("clip", "hardtanh"))


def fold_identities(gm: fx.GraphModule) -> fx.GraphModule:
    """Remove every operation that returns its input's values."""
    aliasing, seen = Aliasing(gm), strides_seen(gm.graph)
    for node in list(gm.graph.nodes):
        source = node.args[0] if is_repeated(node) else copied(node)
        if source is not None and _may_be(node, source, aliasing) and not (_reorders(node) and node in seen):
            replace(node, source)
    return finish(gm)


def _reorders(node: fx.Node) -> bool:
    """Whether node may have other strides than its source: those of what is computed of it follow from them."""
    return is_call(node, ops.contiguous) and not is_call(node.args[0], *ops.ROW_MAJOR)


def _may_be(node: fx.Node, source: fx.Node, aliasing: Aliasing) -> bool:
    """Whether nobody can tell a copy from its source: by strides, by being the same tensor, by later writes."""
    written = aliasing.is_written(source) or aliasing.is_written(node)
    if is_repeated(node) and not written and source.users.keys() <= _computing(source) | {node}:
        return True
    return only_values_count(node) and not aliasing.is_written_after(source, node)


def _computing(source: fx.Node) -> set[fx.Node]:
    """Readers that compute something of a value: nothing else knows of it."""
    return {user for user in source.users if user.target in ops.COMPUTE}


def copied(node: fx.Node) -> fx.Node | None:
    """What node is a copy of, if it is one."""
    if is_call(node, ops.contiguous) or is_neutral(node) or (is_call(node, ops.pad) and not any(node.args[1])):
        return node.args[0]
    if is_call(node, ops.narrow) and node.args[2] in (0, None) and _is_end(node.args[3]):
        return node.args[0]
    return node.args[0][0] if is_call(node, ops.concat) and len(node.args[0]) == 1 else None


def is_neutral(node: fx.Node) -> bool:
    """Whether node multiplies by 1, or adds 0 to integers, and keeps the dtype (0 added to -0.0 is another number)."""
    if not is_call(node, ops.binary) or isinstance(node.args[1], fx.Node) or not isinstance(node.args[0], fx.Node):
        return False
    src, number, kind = node.args
    have, want = src.meta.get("val"), node.meta.get("val")
    if not isinstance(have, torch.Tensor) or not isinstance(want, torch.Tensor) or have.dtype != want.dtype:
        return False
    if kind in ("mul", "div"):
        return bool(number == 1)
    return kind in ("add", "sub") and number == 0 and not have.is_floating_point()


def _is_end(stop: object) -> bool:
    """Whether a slice ends where the tensor does, whatever that one's size is."""
    return stop is None or (type(stop) is int and stop >= NO_END)


def is_repeated(node: fx.Node) -> bool:
    """Whether node is an activation that leaves its input as it is: relu after relu, abs or a clip from 0 on."""
    if not is_call(node, ops.eltwise) or not is_call(node.args[0], ops.eltwise):
        return False
    _, kind, alpha, beta = node.args
    _, before, low, high = node.args[0].args
    if not _keeps_integers(kind, alpha, beta) and not _is_floating(node):
        return False
    if kind in _FROM_ZERO and alpha == 0:
        return (
            (before == "abs" and _has_absolute_values(node.args[0]))
            or (before in _FROM_ZERO and low == 0)
            or (before in _BOUNDED and low >= 0)
        )
    return kind in _BOUNDED and before in _BOUNDED and alpha <= low and high <= beta


def _keeps_integers(kind: str, alpha: object, beta: object) -> bool:
    """Whether integers stay such: torch.clamp makes them floating-point numbers where a bound is one."""
    bounds = {"clip": (alpha, beta), "clamp_min": (alpha,)}.get(kind, ())
    return all(type(bound) is int for bound in bounds)


def _has_absolute_values(absolute: fx.Node) -> bool:
    """Whether all absolute values are such: that of the smallest integer is that integer."""
    if isinstance(absolute.meta.get("val"), torch.Tensor):
        return _is_floating(absolute)
    source = absolute.args[0]
    while isinstance(source, fx.Node) and source.target in ops.MOVEMENT:
        source = source.args[0]
    return isinstance(source, fx.Node) and source.target in ops.COMPUTE and not is_call(source, ops.binary)


def _is_floating(node: fx.Node) -> bool:
    have = node.args[0].meta.get("val")
    return isinstance(have, torch.Tensor) and have.is_floating_point()
