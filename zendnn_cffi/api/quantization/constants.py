"""Weights that a model computes from its parameters alone, as constants: torchao's quantizer takes no others.

Before: conv2d(x, weight_orig * weight_mask)       torch.nn.utils.prune, weight_norm, spectral_norm
After:  conv2d(x, constant)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fx_passes.graph.graph import get_attribute
from fx_passes.graph.interpreter import call_node
from zendnn_cffi.api.quantization.layers import kind, replace_constant

TRANSPOSED = frozenset(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"))
LAYERS = frozenset(("conv1d", "conv2d", "conv3d", "linear")) | TRANSPOSED
_NORM = "batch_norm"


def fold_constants(exported: fx.GraphModule) -> None:
    """Compute weights, biases and statistics of layers that depend on no input, in place."""
    known: dict[fx.Node, Any] = {}
    for node in list(exported.graph.nodes):
        if node.op == "call_function" and (kind(node) in LAYERS or kind(node) == _NORM):
            for position in range(1, 5 if kind(node) == _NORM else min(3, len(node.args))):
                _fold(exported, node, position, known)
    exported.graph.eliminate_dead_code()
    exported.recompile()


def drop_unread(gm: fx.GraphModule) -> None:
    """Take out parameters that neither the graph reads nor what it calls: floats in whose place are integers."""
    read = {str(node.target) for node in gm.graph.nodes if node.op == "get_attr"}
    called = tuple(f"{node.target}." for node in gm.graph.nodes if node.op == "call_module")
    for name, _ in list(gm.named_parameters(remove_duplicate=False)):
        if name not in read and not name.startswith(called):
            path, _, attribute = name.rpartition(".")
            delattr(gm.get_submodule(path), attribute)


def is_constant(node: Any) -> bool:
    """Whether node is a parameter or buffer that nothing in the graph writes to."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return False
    same = node.graph.find_nodes(op="get_attr", target=node.target) if node.graph else (node,)
    return not any(_writes(user) for each in same for user in each.users)


def of_constants(exported: fx.GraphModule) -> set[fx.Node]:
    """The nodes that are constants, or computed from such alone: they are the same in each call."""
    found: set[fx.Node] = set()
    for node in exported.graph.nodes:
        if is_constant(node) or (_is_pure(node) and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _fold(gm: fx.GraphModule, node: fx.Node, position: int, known: dict[fx.Node, Any]) -> None:
    arg = node.args[position]
    if not isinstance(arg, fx.Node) or arg.op == "get_attr" or not _depends_on_constants(arg, known):
        return
    with torch.no_grad():
        value = _value(gm, arg, known)
    if isinstance(value, Tensor):
        replace_constant(gm, node, position, value.clone(), "folded")


def _depends_on_constants(node: fx.Node, seen: dict[fx.Node, Any]) -> bool:
    waiting = [node]
    visited = set[fx.Node]()
    while waiting:
        each = waiting.pop()
        if each in visited or each in seen or is_constant(each):
            continue
        if not _is_pure(each):
            return False
        visited.add(each)
        waiting.extend(each.all_input_nodes)
    return True


def _is_pure(node: fx.Node) -> bool:
    """Whether a node gives the same for the same operands, and writes to none; what writes to a result is none."""
    if node.op != "call_function" or any(_writes(user) for user in node.users):
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__module__", "") == "_operator"
    return not _writes(node) and torch.Tag.nondeterministic_seeded not in node.target.tags


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _value(gm: fx.GraphModule, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    if node not in known:
        if node.op == "get_attr":
            known[node] = get_attribute(gm, str(node.target))
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: _value(gm, arg, known))
            known[node] = call_node(node, args, kwargs)
    return known[node]
