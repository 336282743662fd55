"""Tensors that a forward makes of numbers alone, once the numbers are known: made while it is traced.

    arange(14) -> meshgrid -> stack  ->  _tensor_constant0

torch.fx does so where no traced value takes part. What is written to in place is left to each call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.aliasing.schemas import only_computes
from fx_passes.graph.graph import copy_graph, unique_name
from fx_passes.graph.interpreter import call_node
from fx_passes.graph.skeleton_module import SkeletonModule
from fx_passes.trace.decisions import DECIDED

_MOST = 1 << 22  # elements of one
_OF_TORCH = ("torch", "torch.functional", "torch._tensor", "_operator")


def make_constants(graph: fx.Graph, root: nn.Module) -> None:
    """Compute what depends on numbers alone; root has the tensors that others read."""
    if not any(map(_is_made_of_numbers, graph.nodes)):
        return
    written = _written(graph, root)
    made: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        is_root = _is_made_of_numbers(node)
        if (is_root or (node.all_input_nodes and made.keys() >= {*node.all_input_nodes})) and _only_computes(node):
            value = None if node in written else _computed(node, made)
            if value is not None:
                made[node] = value
    for node, value in made.items():
        readers = [user for user in node.users if user not in made]
        if readers and isinstance(value, Tensor):
            _hold(node, value, readers, root)
    for node in reversed(made):
        node.meta.pop(DECIDED, None)  # it is the same for all calls
        if not node.users:
            graph.erase_node(node)


def _is_made_of_numbers(node: fx.Node) -> bool:
    return node.op == "call_function" and not node.all_input_nodes and _only_computes(node)


def _only_computes(node: fx.Node) -> bool:
    """Whether an operator makes tensors of what it is given; not those whose numbers mean nothing yet."""
    target: Any = node.target
    if node.op == "call_method":
        name = str(target)
    elif node.op == "call_function" and (getattr(target, "__module__", None) or "torch") in _OF_TORCH:
        name = getattr(target, "__name__", "")
        name = {"getitem": "index", "truediv": "div", "floordiv": "floor_divide"}.get(name, name)
    else:
        return False
    return only_computes(name) and "empty" not in name and "out" not in node.kwargs


def _written(graph: fx.Graph, root: nn.Module) -> set[fx.Node]:
    gm = SkeletonModule(root)
    gm.graph = copy_graph(graph)
    aliasing = Aliasing(gm)
    both = zip(graph.nodes, gm.graph.nodes, strict=True)
    return {node for node, copied in both if aliasing.is_written(copied)}


def _computed(node: fx.Node, made: dict[fx.Node, Any]) -> Any:
    """What node is; None for a number, for what is large, and where it raises."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
    try:
        with torch.no_grad():
            value = call_node(node, args, kwargs)
    except Exception:  # whatever PyTorch raises: each call will
        return None
    tensors = [value] if isinstance(value, Tensor) else value
    if not isinstance(tensors, list | tuple) or not all(isinstance(each, Tensor) for each in tensors):
        return None
    return value if sum(each.numel() for each in tensors) <= _MOST else None


def _hold(node: fx.Node, value: Tensor, readers: list[fx.Node], root: nn.Module) -> None:
    name = unique_name(root, "_tensor_constant")
    setattr(root, name, value)
    with node.graph.inserting_before(node):
        held = node.graph.get_attr(name)
    for reader in readers:
        reader.replace_input_with(node, held)
