"""Plain operations that depend on masks and sizes alone: computed anew where a mask says something else than before.

Models turn a mask [B, S] of ones and zeros into one for each pair of positions, and into numbers for a mean over
tokens: half a dozen small operations whose results mostly are those of the call before, as are the masks. Here they
become one module that compares the masks with those it remembers, one for each shape.

    mask -> to(bool) -> index -> and -> expand -> region
becomes
    mask -> per_mask_0 -> region
"""

from __future__ import annotations

import torch
from torch import fx, nn

from fx_passes.graph.graph import is_shape
from fx_passes.graph.inference import dtype
from fx_passes.memoize.memoised import find_members, is_kept, move_into_module

_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def memoize_masks(gm: fx.GraphModule, root: nn.Module) -> fx.GraphModule:
    """Move what depends on masks and sizes alone into a Memoised module, if that is more than an operation.

    A mask is an input of integers or booleans that nothing else reads: no indices of a table.
    """
    masks = [node for node in gm.graph.find_nodes(op="placeholder") if dtype(node, gm) in _DTYPES]
    while masks:
        members = find_members(gm, lambda node: _is_per_size(gm, node), masks)
        pure = [mask for mask in masks if all(user in members or is_shape(user) for user in mask.users)]
        if len(pure) == len(masks):
            return move_into_module(gm, members, "per_mask", root, masks)
        masks = pure
    return gm


def _is_per_size(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether node is a result of memoize_sizes, of integers or booleans: not of a parameter that is trained."""
    return is_kept(gm, node) and dtype(node, gm) in _DTYPES
