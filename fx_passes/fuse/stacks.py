"""Write stacks that no pattern took as concatenations: a region has these.

Before: stack((conv_1, conv_2), 1).sum(1)
After:  concat((unsqueeze(conv_1, 1), unsqueeze(conv_2, 1)), 1).sum(1)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fx_passes import ops
from fx_passes.graph.graph import argument, finish, is_call, is_stack, is_vocabulary
from fx_passes.spellings.registry import Call, materialize


def write_stacks(gm: fx.GraphModule) -> fx.GraphModule:
    """Rewrite those between operations of the vocabulary; elsewhere PyTorch's is one call in place of several.

    Nobody else may read them: of tensors in channels-last order, a stack has other strides than a concatenation.
    """
    for node in list(filter(is_stack, gm.graph.nodes)):
        tensors, dim = argument(node, 0, "tensors"), argument(node, 1, "dim", 0)
        if not isinstance(tensors, list | tuple) or not tensors or not isinstance(dim, int):
            continue
        if all(map(_is_ours, tensors)) and any(map(_is_ours, node.users)) and all(map(is_vocabulary, node.users)):
            rows = tuple(Call(ops.unsqueeze, (tensor, dim)) for tensor in tensors)
            written = materialize(gm.graph, Call(ops.concat, (rows, dim)), node, node.meta.get("source", ""))
            node.replace_all_uses_with(written)
            gm.graph.erase_node(node)
    return finish(gm)


def _is_ours(value: Any) -> bool:
    return is_call(value, *ops.COMPUTE, *ops.MOVEMENT)
