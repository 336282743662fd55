"""Recognise linear layers of values that are quantized by scales computed in the call (PT2E, dynamic, per tensor).

Before: scale, zero_point = choose_qparams.tensor(x, low, high, eps, dtype)
        linear(dequantize(quantize(x, scale, zero_point), scale, zero_point), dequantize(weight), bias)
After:  chosen = choose_scale(x); dynamic_linear(quantize_by(x, chosen), chosen, dequantize(weight), bias)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.graph.graph import finish, is_call

_DTYPES = (torch.uint8, torch.int8)


def fuse_dynamic_quantization(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace every chain whose dequantized values only linear layers of int8 weights read."""
    for node in gm.graph.find_nodes(op="call_function", target=ops.quantize):
        choice = match_choice(node)
        readers = _layers(node)
        if choice is None or not readers:
            continue
        src, _, _, _, low, high, dtype = node.args
        with gm.graph.inserting_before(node):
            chosen = gm.graph.call_function(ops.choose_scale, (*choice.args[:5], _is_symmetric(choice)))
            kept = gm.graph.call_function(ops.quantize_by, (src, chosen, low, high, dtype))
        chosen.meta = {"source": choice.meta.get("source", "")}
        kept.meta = dict(node.meta)
        for linear in readers:
            linear.target, linear.args = ops.dynamic_linear, (kept, chosen, *linear.args[1:])
        _erase_unread(gm.graph, node, choice)
    return finish(gm)


def _erase_unread(graph: fx.Graph, node: fx.Node, choice: fx.Node) -> None:
    """What nobody reads any more; choice is named, as operators with a schema of their own are kept else."""
    for unread in (*node.users, node, *choice.users, choice):
        if not unread.users:
            graph.erase_node(unread)


def match_choice(node: fx.Node) -> fx.Node | None:
    """The call of choose_qparams that gives node, an ops.quantize, its scale and zero point; None where none does."""
    _, scale, zero_point, axis, low, high, dtype = node.args
    if axis is not None or not is_call(scale, operator.getitem) or not is_call(zero_point, operator.getitem):
        return None
    choice: Any = scale.args[0]
    if (scale.args[1], zero_point.args) != (0, (choice, 1)) or not isinstance(choice, fx.Node) or choice.kwargs:
        return None
    if _name(choice) not in _CHOICES or len(choice.args) != 5 or dtype not in _DTYPES:
        return None
    return choice if choice.args[1:3] == (low, high) and choice.args[4] == dtype else None


def _layers(node: fx.Node) -> list[fx.Node]:
    """The linear layers that read what node quantizes; empty where anything else does, or weights are no int8."""
    found: list[fx.Node] = []
    for real in node.users:
        if not is_call(real, ops.dequantize) or real.args[1:4] != (*node.args[1:3], None):
            return []
        if real.args[4] != torch.float32:
            return []
        for reader in real.users:
            if not is_call(reader, ops.linear) or reader.args[0] is not real or reader.args[1] is real:
                return []
            if not is_call(reader.args[1], ops.dequantize):
                return []
            found.append(reader)
    return list(dict.fromkeys(found))


def _name(node: fx.Node) -> str:
    target = node.target
    return str(target) if node.op == "call_function" and isinstance(target, torch._ops.OpOverload) else ""


def _is_symmetric(choice: fx.Node) -> bool:
    return _name(choice) == _CHOICES[1]


_CHOICES = ("quantized_decomposed.choose_qparams.tensor", "quantized_decomposed.choose_qparams_symmetric.tensor")
