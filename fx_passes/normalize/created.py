"""Tensors that forward makes anew in each call, which symbolic tracing made once.

    forward: return x, torch.ones(3)
    Before:  get_attr _tensor_constant0, the same tensor in each call
    After:   clone(get_attr _tensor_constant0)

Only where the caller, or a module that nobody knows, gets to see one and may write to it; forward itself writes to none
(fx_passes.trace.trace).
"""

from __future__ import annotations

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
    for node in created:
        if aliasing.is_written(node) or any(user.op == "output" for user in aliasing.readers(node)):
            readers = list(node.users)
            with gm.graph.inserting_before(node.next):
                fresh = copy_of(node, get_attribute(gm, node.target))
            for reader in readers:
                reader.replace_input_with(node, fresh)
    return finish(gm)


def copy_of(node: fx.Node, tensor: torch.Tensor) -> fx.Node:
    """A copy of what node stands for, with its strides: where they overlap or leave gaps, of all of its memory."""
    aten, call = torch.ops.aten, node.graph.call_function
    if tensor.layout is not torch.strided or tensor.clone().stride() == tensor.stride():
        return call(aten.clone.default, (node,))
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = call(aten.as_strided.default, (node, [length], [1], 0))
    seen = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
    return call(aten.as_strided.default, (call(aten.clone.default, (memory,)), *seen))
