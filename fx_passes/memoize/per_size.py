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

from typing import Any

import torch
from torch import fx, nn

from fx_passes.graph.graph import is_constant, is_shape
from fx_passes.memoize.remembering import WORTHWHILE, Remembering, drop_shared, is_plain_operation, move_into_module
from fx_passes.memoize.watched import is_watched
from fx_passes.partition.partition import Constants

_MAX_KEPT_BYTES = 64 << 20  # of one combination's results; more are computed each time


class PerSize(Remembering):
    """Computes graph from sizes and constants; results are kept for each combination of sizes."""

    def forward(self, *sizes: Any) -> tuple[torch.Tensor, ...]:
        """Return the tensors that others read, in graph order."""
        if is_watched():
            return self._compute(sizes)
        kept = self._kept.get(sizes)
        if kept is not None and not torch.is_grad_enabled():
            return kept
        if torch.is_autocast_enabled("cpu"):
            return self._compute(sizes)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.constants.values()):
            return self._compute(sizes)
        with torch.inference_mode(False), torch.no_grad():
            results = self._compute(sizes)
        if sum(t.numel() * t.element_size() for t in results) <= _MAX_KEPT_BYTES:
            self._keep(sizes, results)
        return results

    def extra_repr(self) -> str:
        return f"{self._operations} operations, known for {len(self._kept)} combinations of sizes"


def memoize_sizes(gm: fx.GraphModule, root: nn.Module) -> fx.GraphModule:
    """Move what depends on sizes and constants alone into a PerSize module, if that is more than an operation."""
    members = _members(gm)
    if len(members) < WORTHWHILE:
        return gm
    members = _merge_equal(members)
    inside = set(members)
    sizes = list(dict.fromkeys(s for n in members for s in n.all_input_nodes if s not in inside and is_shape(s)))
    return move_into_module(gm, members, sizes, "per_size", lambda inner, names: PerSize(inner, Constants(root, names)))


def _merge_equal(members: list[fx.Node]) -> list[fx.Node]:
    """Let one node stand for all that compute the same (each layer shapes the tables of angles for itself)."""
    first: dict[tuple[Any, ...], fx.Node] = {}
    for node in members:
        key = node.target, repr(node.args), repr(node.kwargs)
        other = first.setdefault(key, node)
        if other is not node:
            node.replace_all_uses_with(other)
            node.graph.erase_node(node)
    return list(first.values())


def _members(gm: fx.GraphModule) -> list[fx.Node]:
    """Operations on sizes and constants whose memory nobody writes to, and that the caller does not get to see."""
    found: dict[fx.Node, None] = {}
    for node in gm.graph.nodes:
        if not is_plain_operation(node):
            continue
        if all(source in found or is_constant(source) or is_shape(source) for source in node.all_input_nodes):
            found[node] = None
    drop_shared(found, gm)
    kept: dict[fx.Node, None] = {}
    for node in found:  # again: what read a removed one is no member either
        if all(source in kept or is_constant(source) or is_shape(source) for source in node.all_input_nodes):
            kept[node] = None
    return list(kept)
