"""Broadcast what a matrix product adds, where kernels take it as large as the result alone.

    matmul(a, b)[+ mask [M, N]]  ->  expand(mask, [B, M, N]) -> matmul(a, b)[+ that]

The other way, a sum after the product, rounds the product first. In bf16 that shows: torch.baddbmm and addmm, which
attention uses where weights are asked for, round once.
"""

from __future__ import annotations

from torch import fx

from fx_passes import ops
from fx_passes.candidates.specs import RegionValues
from fx_passes.graph.graph import is_call


def adds_part(node: fx.Node, index: int, values: RegionValues) -> bool:
    """Whether post-op `index` of a matrix product (2 or 3 dimensions) adds a tensor that broadcasts to the result."""
    name, *args = node.kwargs["post_ops"][index]
    if not is_call(node, ops.matmul) or name != "binary" or args[0] != "add" or args[1] not in values.specs:
        return False
    base, other = values.base(node), values.specs[args[1]]
    if base.ndim > 3 or other.dtype != base.dtype or other.shape == base.shape or other.ndim > base.ndim:
        return False
    return all(n in (1, m) for n, m in zip(reversed(other.shape), reversed(base.shape), strict=False))


def expand_addend(node: fx.Node, index: int, values: RegionValues) -> fx.Node:
    """Let post-op `index` read its operand broadcast by a new node before this one; return that."""
    entries = [*node.kwargs["post_ops"]]
    name, kind, other, *is_first = entries[index]
    with node.graph.inserting_before(node):
        whole = node.graph.call_function(ops.expand, (other, values.base(node).shape))
    whole.meta["source"] = node.meta.get("source", "")
    values.infer(whole)
    entries[index] = (name, kind, whole, *is_first)
    node.kwargs = {**node.kwargs, "post_ops": tuple(entries)}
    return whole
