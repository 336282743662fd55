"""Masks that are computed in each call and read by several regions: the first one looks at them, for all.

    mask -> region, region, region
becomes
    mask -> asked_once -> region, region, region

Each region asks what its mask says, and makes it additive: ten small operations of PyTorch. A decoder whose cache is
written to between its layers has a region for each layer, and one mask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import argument, finish
from fx_passes.memoize.masks import asked_once, mask_inputs
from fx_passes.memoize.memoised import is_kept

_UNWRITTEN = "is an unwritten mask"  # in meta


def note_unwritten_masks(gm: fx.GraphModule) -> fx.GraphModule:
    """Note which masks of several attentions nobody writes to, before regions hide what reads whose memory."""
    attentions = gm.graph.find_nodes(op="call_function", target=ops.attention)
    read = Counter(mask for node in attentions if isinstance(mask := argument(node, 3, "mask"), fx.Node))
    shared = [mask for mask, count in read.items() if count > 1]
    if shared:
        aliasing = Aliasing(gm)
        for mask in shared:
            mask.meta[_UNWRITTEN] = not aliasing.is_written(mask)
    return gm


def share_masks(gm: fx.GraphModule) -> fx.GraphModule:
    """Let regions that read one mask, which nobody writes to, ask once what it says."""
    readers = {mask: calls for mask, calls in _readers(gm).items() if len(calls) > 1 and mask.meta.get(_UNWRITTEN)}
    for mask, calls in readers.items():
        if is_kept(gm, mask):
            continue  # asked once for good
        with gm.graph.inserting_before(calls[0]):
            asked = gm.graph.call_function(asked_once, (mask,))
        asked.meta.update({key: value for key, value in mask.meta.items() if key == "val"})
        for call in calls:
            call.replace_input_with(mask, asked)
    return finish(gm) if readers else gm


def _readers(gm: fx.GraphModule) -> Mapping[fx.Node, list[fx.Node]]:
    """The calls of regions that read a node as a mask alone, in order."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for call in gm.graph.find_nodes(op="call_module"):
        region: Any = gm.get_submodule(str(call.target))
        if not hasattr(region, "invalidate") or not isinstance(getattr(region, "graph", None), fx.Graph):
            continue
        numbers = mask_inputs(region.graph)
        for mask in {call.args[number] for number in numbers}:
            alone = all(number in numbers for number, source in enumerate(call.args) if source is mask)
            if isinstance(mask, fx.Node) and alone:
                found.setdefault(mask, []).append(call)
    return found
