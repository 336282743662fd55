"""Plain operations that depend on masks and sizes alone: computed anew where a mask says something else than before.

Models turn a mask [B, S] of ones and zeros into one for each pair of positions, and into numbers for a mean over
tokens: half a dozen small operations whose results mostly are those of the call before, as are the masks. Here they
become one module that compares the masks with those it remembers, one for each shape.

    mask -> to(bool) -> index -> and -> expand -> region
becomes
    mask -> per_mask_0 -> region
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from fx_passes.graph import is_constant, is_pure, is_shape, is_vocabulary, run
from fx_passes.lower.masks import remember
from fx_passes.partition.per_size import PerSize, drop_shared, move_into_module
from fx_passes.watched import is_watched

_MAX_KEPT = 8  # combinations of shapes
_MAX_MASK_ELEMENTS = 1 << 16  # of larger ones comparing costs about as much as computing
_MAX_KEPT_BYTES = 8 << 20  # of one combination's results
_WORTHWHILE = 2  # operations
_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

Entry = tuple[tuple[Tensor, ...], tuple[Any, ...], tuple[Tensor, ...]]  # masks, other arguments, results


class PerMask(nn.Module):
    """Computes graph from masks, the first of its arguments, and sizes and tensors that depend on sizes alone.

    What it returns is remembered with a copy of the masks, and given again for equal ones. Readers must not write to
    it: memoize_masks sees to that.
    """

    reads_numbers = True  # for fx_passes.normalize.effects: it neither writes to, nor hands on, what it is given

    def __init__(self, graph: fx.Graph, masks: int) -> None:
        super().__init__()
        self.graph = graph
        self.masks = masks
        self._kept: OrderedDict[tuple[Any, ...], Entry] = OrderedDict()
        self._lock = threading.Lock()

    def forward(self, *given: Any) -> tuple[Tensor, ...]:
        """Return the tensors that others read, in graph order."""
        masks, others = given[: self.masks], given[self.masks :]
        if is_watched() or not all(map(_is_plain, masks)) or torch.is_autocast_enabled("cpu"):
            return self._compute(given)
        key = (*((m.shape, m.dtype) for m in masks), *(id(x) if isinstance(x, Tensor) else x for x in others))
        entry = self._kept.get(key)  # it holds the tensors whose addresses are in the key
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
            with self._lock:
                self._kept[key] = copies, others, results
                self._kept.move_to_end(key)
                while len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
        return results

    def _compute(self, given: tuple[Any, ...]) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = run(self.graph, {}, given)
        return results

    def forget(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._kept.clear()

    def extra_repr(self) -> str:
        ops = sum(node.op == "call_function" for node in self.graph.nodes)
        return f"{ops} operations on {self.masks} masks, known for {len(self._kept)} combinations of shapes"


def _is_plain(mask: Any) -> bool:
    return type(mask) is Tensor and mask.is_cpu and mask.layout is torch.strided


def memoize_masks(gm: fx.GraphModule) -> fx.GraphModule:
    """Move what depends on masks and sizes alone into a PerMask module, if that is more than an operation.

    A mask is an input of integers or booleans that nothing else reads: no indices of a table.
    """
    masks = [node for node in gm.graph.find_nodes(op="placeholder") if _dtype(node) in _DTYPES]
    members = _members(gm, masks)
    while masks and (mixed := [m for m in masks if not all(n in members or is_shape(n) for n in m.users)]):
        masks = [m for m in masks if m not in mixed]
        members = _members(gm, masks)
    if len(members) < _WORTHWHILE:
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

    collect([node for node in gm.graph.nodes if _is_plain_operation(node)])
    before = None
    while before != len(found):  # what read a removed one is no member either
        before = len(found)
        drop_shared(found, gm)
        collect(list(found))
    return found


def _is_plain_operation(node: fx.Node) -> bool:
    if node.op != "call_function" or is_shape(node) or not (is_pure(node) or is_vocabulary(node)):
        return False
    return isinstance(node.meta.get("val"), Tensor) and not is_constant(node)


def _is_per_size(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether node is a result of a PerSize module, of integers or booleans: not of a parameter that is trained."""
    call = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(call, fx.Node) or call.op != "call_module" or _dtype(node) not in _DTYPES:
        return False
    return isinstance(gm.get_submodule(str(call.target)), PerSize)


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None
