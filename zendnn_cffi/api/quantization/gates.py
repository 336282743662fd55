"""Squeeze and excitation: let the product read the value as its average does, in integers.

    Before: x -> observer -> average -> ... -> gate     x * gate        x is written twice, in float32 and in integers
    After:  x -> observer -> average -> ... -> gate     observer * gate

PT2E's quantizer for x86 observes what averages read, and leaves products in float.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from zendnn_cffi.api.quantization.layers import kind, observer_of

_PRODUCTS = frozenset(("mul", "mul_"))


def share_observers(prepared: fx.GraphModule) -> list[str]:
    """Let products of a value [N, C, H, W] and a gate [N, C, 1, 1] read the value's observer, in place; their names."""
    shared = []
    for node in prepared.graph.nodes:
        value = _gated_value(node)
        if value is None:
            continue
        for user in value.users:
            if observer_of(prepared, user) is not None:
                node.replace_input_with(value, user)
                shared.append(node.name)
                break
    prepared.recompile()
    return shared


def _gated_value(node: fx.Node) -> fx.Node | None:
    """What a gate multiplies in node; None where there is no gate."""
    if node.op != "call_function" or kind(node) not in _PRODUCTS or len(node.args) < 2:
        return None
    shapes = [_shape(arg) for arg in node.args[:2]]
    if any(len(shape) != 4 for shape in shapes):
        return None
    value = 0 if shapes[1][2:] == (1, 1) else 1
    gate, shape = shapes[1 - value], shapes[value]
    if gate != (*shape[:2], 1, 1) or gate == shape or (value and kind(node) == "mul_"):
        return None
    found = node.args[value]
    assert isinstance(found, fx.Node)
    return found


def _shape(arg: Any) -> tuple[int, ...]:
    found = arg.meta.get("val") if isinstance(arg, fx.Node) else None
    return tuple(found.shape) if isinstance(found, Tensor) else ()
