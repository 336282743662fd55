"""Give up the parameters of which only packed copies are needed (optimize(..., release_weights=True)).

Once every region has a program, a region's constants are what its programs hold: packed weights, from which the plain
ones are made again when another program is lowered. What cannot be made again (Winograd's transformed weights) is kept
plain as well, folded.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fx_passes.layout.reorder import reorder_into
from fx_passes.lower.candidates import Candidate, Operation, PrimitiveTemplate, Weights
from fx_passes.lower.layouts import row_major
from fx_passes.lower.specs import evaluate_constants
from fx_passes.plan.prepack import Packed
from zendnn_cffi.memory import Memory, MemoryDesc

if TYPE_CHECKING:
    from fx_passes.module import OptimizedModule
    from fx_passes.region import ZenRegion


_TRANSFORMED_SHARE = 0.05  # of all parameters' bytes, that Winograd's transformed weights may take in addition


def limit_transforms(operations: Sequence[Operation], parameters_bytes: int) -> None:
    """Take Winograd candidates from operations, the last first, until what they add to memory is a small share.

    Transformed weights are up to four times as large, and the plain ones cannot be made from them again. Early layers
    have few channels, so little weight, and gain the most.
    """
    budget = int(parameters_bytes * _TRANSFORMED_SHARE)
    for operation in operations:
        fits = [c for c in operation.candidates if _transformed_bytes(c) <= budget]
        if fits:
            operation.candidates = fits
            budget -= max(map(_transformed_bytes, fits))


def _transformed_bytes(candidate: Candidate) -> int:
    """Bytes of weights that plain ones cannot be made from."""
    templates = [t for t in candidate.calls if isinstance(t, PrimitiveTemplate)]
    weights = [a for t in templates for a in t.args.values() if isinstance(a, Weights)]
    return sum(w.desc.size_bytes for w in weights if w.desc.outer_strides is None)


class Kept(Mapping[str, torch.Tensor]):
    """Constants of a released region by name: plain ones as they are, packed ones made plain each time."""

    def __init__(self, plain: dict[str, torch.Tensor], packed: Mapping[str, Any]) -> None:
        self._plain, self._packed = plain, packed

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._plain:
            return self._plain[name]
        packed, shape, dtype = self._packed[name]
        return unpacked(packed).reshape(shape).to(dtype)

    @property
    def plain(self) -> list[torch.Tensor]:
        """What is kept plain."""
        return list(self._plain.values())

    def __iter__(self) -> Iterator[str]:
        return iter((*self._plain, *self._packed))

    def __len__(self) -> int:
        return len(self._plain) + len(self._packed)


def unpacked(packed: Packed) -> torch.Tensor:
    """Packed weights as a plain dense tensor of desc's dims, or those swapped where it is the transpose."""
    desc = packed.desc
    assert desc.dtype is not None
    with torch.inference_mode(False):
        plain = torch.empty(desc.dims, dtype=desc.dtype)
    reorder_into(Memory(desc, packed.data.data_ptr()), plain, row_major(desc.dims, desc.dtype))
    return plain.t().contiguous() if packed.transposed else plain


def release(gm: OptimizedModule, regions: Sequence[ZenRegion]) -> int:
    """Free the parameters that these regions alone read; return the bytes no longer held. Each must have a program."""
    read = {region: set(region.constants) for region in regions}
    released = [region for region in regions if release_region(region)]
    names = set().union(*(read[region] for region in released))
    tensors = {**dict(gm.named_parameters(remove_duplicate=False)), **dict(gm.named_buffers(remove_duplicate=False))}
    kept = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
    for node in gm.graph.find_nodes(op="call_module"):
        inside: Any = gm.get_submodule(str(node.target))
        below = [name for name in tensors if name.startswith(f"{node.target}.")]
        kept |= set(getattr(inside, "constants", below)) if inside not in released else set()
    shared = {id(tensors[name]) for name in kept if name in tensors}
    freed = 0
    for tensor in {id(tensors[name]): tensors[name] for name in names}.values():
        if id(tensor) not in shared:
            freed += tensor.numel() * tensor.element_size()
            tensor.data = torch.empty(0, dtype=tensor.dtype)
    return freed


def release_region(region: ZenRegion) -> bool:
    """Let the region's graph begin at the constants that run-time operations read; whether it could be done."""
    graph = copy.deepcopy(region.graph)
    values = evaluate_constants(graph, region.constants)
    frontier = [node for node in values if any(user not in values for user in node.users)]
    if not all(isinstance(values[node], torch.Tensor) for node in frontier):
        return False
    packed, half = region.weights.by_name(), region.options.dtype
    plain: dict[str, torch.Tensor] = {}
    remade: dict[str, tuple[Packed, torch.Size, torch.dtype]] = {}
    for node in frontier:
        value, name = values[node], node.name
        forms = [p for p in packed.get(name, ()) if p.desc.dtype in (value.dtype, half) and _is_whole(p.desc, value)]
        if forms:
            remade[name] = forms[0], value.shape, value.dtype
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


def trim_heap() -> None:
    """Hand freed memory back to the operating system, where the C library can.

    What lowering leaves behind (folded weights among it) lies in reference cycles: collected first.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
