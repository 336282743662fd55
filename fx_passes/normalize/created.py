"""Tensors that forward makes anew in each call, which symbolic tracing made once.

    forward: return x, torch.ones(3)
    Before:  get_attr _tensor_constant0, the same tensor in each call
    After:   clone(get_attr _tensor_constant0)

Only where the caller, or a module that nobody knows, gets to see one and may write to it; forward itself writes to none
(fx_passes.trace.trace).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import CREATED, finish, get_attribute


def renew_created(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy, in each call, what forward makes anew and hands out."""
    created = [node for node in gm.graph.find_nodes(op="get_attr") if node.meta.get(CREATED)]
    if not created:
        return gm
    aliasing = Aliasing(gm)
    handed_out = [
        node
        for node in created
        if aliasing.is_written(node) or any(user.op == "output" for user in aliasing.readers(node))
    ]
    for nodes in _by_memory(gm, handed_out):
        _renew(nodes, gm)
    return finish(gm)


def _by_memory(gm: fx.GraphModule, nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """The nodes whose tensors lie in one piece of memory, and have one dtype, together."""
    found: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        tensor = get_attribute(gm, node.target)
        lies = (tensor.untyped_storage()._cdata, tensor.dtype) if tensor.layout is torch.strided else id(tensor)
        found.setdefault(lies, []).append(node)
    return list(found.values())


def _renew(nodes: list[fx.Node], gm: fx.GraphModule) -> None:
    """Let readers of nodes read copies, of which those are one that were, and those share memory that did."""
    tensors = [get_attribute(gm, node.target) for node in nodes]
    are_views = len(set(map(id, tensors))) > 1
    copies: dict[int, fx.Node] = {}
    memory: fx.Node | None = None
    for node, tensor in zip(nodes, tensors, strict=True):
        readers = list(node.users)
        if id(tensor) not in copies:
            with gm.graph.inserting_before(node.next):
                if are_views:
                    memory = memory or _copy_of_memory(node, tensor)
                    copies[id(tensor)] = _part(memory, tensor)
                else:
                    copies[id(tensor)] = copy_of(node, tensor)
        for reader in readers:
            reader.replace_input_with(node, copies[id(tensor)])


def copy_of(node: fx.Node, tensor: torch.Tensor) -> fx.Node:
    """A copy of what node stands for, with its strides: where they overlap or leave gaps, of all of its memory."""
    if tensor.layout is not torch.strided or tensor.clone().stride() == tensor.stride():
        return node.graph.call_function(torch.ops.aten.clone.default, (node,))
    return _part(_copy_of_memory(node, tensor), tensor)


def _copy_of_memory(node: fx.Node, tensor: torch.Tensor) -> fx.Node:
    """A copy of all the memory that node's tensor lies in."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = node.graph.call_function(torch.ops.aten.as_strided.default, (node, [length], [1], 0))
    return node.graph.call_function(torch.ops.aten.clone.default, (memory,))


def _part(memory: fx.Node, tensor: torch.Tensor) -> fx.Node:
    """What tensor is of its memory."""
    place = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
    return memory.graph.call_function(torch.ops.aten.as_strided.default, (memory, *place))
