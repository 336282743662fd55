"""Plain operations that depend on masks and sizes alone: computed anew where a mask says something else than before.

Models turn a mask [B, S] of ones and zeros into one for each pair of positions, and into numbers for a mean over
tokens: half a dozen small operations whose results mostly are those of the call before, as are the masks. Here they
become one module that compares the masks with those it remembers, one for each shape.

    mask -> to(bool) -> index -> and -> expand -> region
becomes
    mask -> per_mask_0 -> region
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fx_passes.graph.graph import is_shape
from fx_passes.graph.inference import dtype
from fx_passes.memoize.masks import remember
from fx_passes.memoize.per_size import PerSize
from fx_passes.memoize.remembering import WORTHWHILE, Remembering, drop_shared, is_plain_operation, move_into_module
from fx_passes.memoize.watched import is_watched

_MAX_MASK_ELEMENTS = 1 << 16  # of larger ones comparing costs about as much as computing
_MAX_KEPT_BYTES = 8 << 20  # of one combination's results
_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

Entry = tuple[tuple[Tensor, ...], tuple[Any, ...], tuple[Tensor, ...]]  # masks, other arguments, results


class PerMask(Remembering):
    """Computes graph from masks, the first of its arguments, and sizes and tensors that depend on sizes alone.

    What it returns is kept with a copy of the masks, and given again for equal ones.
    """

    most_kept = 8  # combinations of shapes

    def __init__(self, graph: fx.Graph, masks: int) -> None:
        super().__init__(graph, {})
        self.masks = masks

    def forward(self, *given: Any) -> tuple[Tensor, ...]:
        """Return the tensors that others read, in graph order."""
        masks, others = given[: self.masks], given[self.masks :]
        if is_watched() or not all(map(_is_plain, masks)) or torch.is_autocast_enabled("cpu"):
            return self._compute(given)
        key = (*((m.shape, m.dtype) for m in masks), *(id(x) if isinstance(x, Tensor) else x for x in others))
        entry: Entry | None = self._kept.get(key)  # it holds the tensors whose addresses are in the key
        if entry is not None and all(map(torch.equal, entry[0], masks)):
            return entry[2]
        if sum(m.numel() for m in masks) > _MAX_MASK_ELEMENTS:
            return self._compute(given)
        with torch.inference_mode(False), torch.no_grad():
            copies = tuple(m.clone() for m in masks)
            results = self._compute((*copies, *others))
        if sum(t.untyped_storage().nbytes() for t in results) <= _MAX_KEPT_BYTES:
            for result in results:
                remember(result)
            self._keep(key, (copies, others, results))
        return results

    def extra_repr(self) -> str:
        return (
            f"{self._operations} operations on {self.masks} masks, known for {len(self._kept)} combinations of shapes"
        )


def _is_plain(mask: Any) -> bool:
    return type(mask) is Tensor and mask.is_cpu and mask.layout is torch.strided


def memoize_masks(gm: fx.GraphModule) -> fx.GraphModule:
    """Move what depends on masks and sizes alone into a PerMask module, if that is more than an operation.

    A mask is an input of integers or booleans that nothing else reads: no indices of a table.
    """
    masks = [node for node in gm.graph.find_nodes(op="placeholder") if dtype(node, gm) in _DTYPES]
    members = _members(gm, masks)
    while masks and (mixed := [m for m in masks if not all(n in members or is_shape(n) for n in m.users)]):
        masks = [m for m in masks if m not in mixed]
        members = _members(gm, masks)
    if len(members) < WORTHWHILE:
        return gm
    read = {source for node in members for source in node.all_input_nodes if source not in members}
    masks = [m for m in masks if m in read]
    others = [node for node in gm.graph.nodes if node in read and node not in masks]
    return move_into_module(
        gm, list(members), [*masks, *others], "per_mask", lambda inner, _: PerMask(inner, len(masks))
    )


def _members(gm: fx.GraphModule, masks: list[fx.Node]) -> Mapping[fx.Node, None]:
    """Operations on masks, sizes and what depends on sizes, whose memory nobody writes to or gets to see."""
    found: dict[fx.Node, None] = {}
    given = set(masks)

    def is_known(source: fx.Node) -> bool:
        return source in found or source in given or is_shape(source) or _is_per_size(gm, source)

    def collect(nodes: list[fx.Node]) -> None:
        found.clear()
        for node in nodes:
            sources = node.all_input_nodes
            if any(s in found or s in given for s in sources) and all(map(is_known, sources)):
                found[node] = None

    collect([node for node in gm.graph.nodes if is_plain_operation(node)])
    before = None
    while before != len(found):  # what read a removed one is no member either
        before = len(found)
        drop_shared(found, gm)
        collect(list(found))
    return found


def _is_per_size(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether node is a result of a PerSize module, of integers or booleans: not of a parameter that is trained."""
    call = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(call, fx.Node) or call.op != "call_module" or dtype(node, gm) not in _DTYPES:
        return False
    return isinstance(gm.get_submodule(str(call.target)), PerSize)
