"""Give up the parameters of which only packed copies are needed (optimize(..., release_weights=True)).

Once every region has a program, a region's constants are what its programs hold: packed weights, from which the plain
ones are made again when another program is lowered. What cannot be made again (Winograd's transformed weights) is kept
plain as well, folded. fx_passes.saved.released copies and saves what is left.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.specs import evaluate_constants
from fx_passes.region.kept import Form, Kept
from fx_passes.region.region import ZenRegion
from zendnn_cffi.primitives.memory import MemoryDesc


def release(gm: fx.GraphModule, regions: Sequence[ZenRegion]) -> bool:
    """Free the parameters that these regions alone read; whether there are any. Each must have a program.

    A region whose parameters are all read elsewhere, too, keeps them: nothing would come back.
    """
    tensors = {**dict(gm.named_parameters(remove_duplicate=False)), **dict(gm.named_buffers(remove_duplicate=False))}
    others = _read_outside(gm, tensors, regions)
    useful = [r for r in regions if any(name in tensors and id(tensors[name]) not in others for name in r.constants)]
    read = {region: set(region.constants) for region in useful}
    released = [region for region in useful if release_region(region)]
    others = _read_outside(gm, tensors, released)
    for region in released:
        kept: Any = region.constants
        kept.still = tuple(sorted(n for n in read[region] if n in tensors and id(tensors[n]) in others))
    names = set().union(*(read[region] for region in released))
    for tensor in {id(tensors[name]): tensors[name] for name in names if name in tensors}.values():
        if id(tensor) not in others:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return bool(released)


def _read_outside(gm: fx.GraphModule, tensors: Mapping[str, torch.Tensor], regions: Sequence[ZenRegion]) -> set[int]:
    """The ids of the tensors that others than these regions read."""
    names = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
    for node in gm.graph.find_nodes(op="call_module"):
        inside: Any = gm.get_submodule(str(node.target))
        below = [name for name in tensors if name.startswith(f"{node.target}.")]
        names |= set(getattr(inside, "constants", below)) if inside not in regions else set()
    return {id(tensors[name]) for name in names if name in tensors}


def release_region(region: ZenRegion) -> bool:
    """Let the region's graph begin at the constants that run-time operations read; whether it could be done."""
    graph = copy.deepcopy(region.graph)
    values = evaluate_constants(graph, region.constants)
    for node in graph.find_nodes(op="call_function", target=ops.dequantize):
        if not all(user in values for user in node.users):
            values.pop(node, None)  # its integers are a quarter of what they stand for
    frontier = [node for node in values if any(user not in values for user in node.users)]
    if not all(isinstance(values[node], torch.Tensor) for node in frontier):
        return False
    packed, half = region.weights.by_name(), region.options.dtype
    plain: dict[str, torch.Tensor] = {}
    remade: dict[str, Form] = {}
    for node in frontier:
        value, name = values[node], node.name
        forms = [p for p in packed.get(name, ()) if p.desc.dtype in (value.dtype, half) and _is_whole(p.desc, value)]
        if forms:
            remade[name] = Form(forms[0], value.shape, value.dtype)
        else:
            plain[name] = value
        _read_from(graph, node, name)
    for node in reversed(graph.nodes):
        if node in values and not node.users:
            graph.erase_node(node)
    region.begin_at(graph, Kept(plain, remade))
    return True


def _is_whole(desc: MemoryDesc, value: torch.Tensor) -> bool:
    """Whether the packed form holds every element as it is: a blocked layout, without a transform."""
    numel = 1
    for size in desc.dims:
        numel *= size
    return desc.outer_strides is not None and numel == value.numel() and not desc.ptr.extra.flags


def _read_from(graph: fx.Graph, node: fx.Node, name: str) -> None:
    """Put a get_attr of the same name in node's place."""
    with graph.inserting_before(node):
        fresh: Any = graph.get_attr(name)
    fresh.meta.update(node.meta)
    node.replace_all_uses_with(fresh)
    node.name, fresh.name = fresh.name, name
