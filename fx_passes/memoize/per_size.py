"""Plain operations that depend on sizes and constants alone: computed once for each combination of sizes.

Positions, token types, masks of what comes later, tables of angles: models make them anew in each call, dozens of small
operations that cost more than a region. Here they become one module that remembers its results by the sizes it is
called with.

    ids -> size -> arange -> add -> embedding(table) \\
    ids -> embedding(table) -------------------------- region
becomes
    ids -> size -> per_size_0 -> region
"""

from __future__ import annotations

from torch import fx, nn

from fx_passes.memoize.memoised import WORTHWHILE, find_members, move_into_module


def memoize_sizes(gm: fx.GraphModule, root: nn.Module) -> fx.GraphModule:
    """Move what depends on sizes and constants alone into a Memoised module, if that is more than an operation.

    What depends on sizes that are known behind it (a pooling between the layers of a transformer) is in a further one.
    """
    while len(members := find_members(gm)) >= WORTHWHILE:
        gm = move_into_module(gm, members, "per_size", root)
    return gm
