"""Tensors that forward makes anew in each call, which symbolic tracing made once.

    forward: return x, torch.ones(3)
    Before:  get_attr _tensor_constant0, the same tensor in each call
    After:   clone(get_attr _tensor_constant0)

Only where the caller, or a module that nobody knows, gets to see one and may write to it; forward itself writes to none
(fx_passes.trace).
"""

from __future__ import annotations

import torch
from torch import fx

from fx_passes.graph import CREATED, finish
from fx_passes.normalize.aliasing import Aliasing


def renew_created(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy, in each call, what forward makes anew and hands out."""
    created = [node for node in gm.graph.find_nodes(op="get_attr") if node.meta.get(CREATED)]
    if not created:
        return gm
    aliasing = Aliasing(gm)
    for node in created:
        if aliasing.is_written(node) or any(user.op == "output" for user in aliasing.readers(node)):
            with gm.graph.inserting_before(node.next):
                fresh = gm.graph.call_function(torch.ops.aten.clone.default, (node,))
            node.replace_all_uses_with(fresh, delete_user_cb=lambda user, fresh=fresh: user is not fresh)
    return finish(gm)
