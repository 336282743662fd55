"""Modules whose parameters were released: packed weights are left, which are copied, pickled and saved.

As a loaded module, such a module is made of its graph and its parts, not by the passes again: these want parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from fx_passes.bags.offset_bags import JoinedOffsetBags
from fx_passes.graph.graph import copy_graph
from fx_passes.memoize.memoised import Memoised
from fx_passes.module import OptimizedModule
from fx_passes.partition.partition import Constants
from fx_passes.plan.prepack import Packed, as_it_lies
from fx_passes.region.kept import Form, Kept
from fx_passes.region.region import ZenRegion
from fx_passes.region.release import release
from fx_passes.saved.container import PACKED
from fx_passes.saved.encoding import decode, encode
from fx_passes.saved.errors import FileError
from fx_passes.saved.layouts import Layouts, NoForm
from fx_passes.trace.guards import Guards
from fx_passes.trace.traced import Traced
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.values import dataclass

Tensors = dict[str, torch.Tensor]


def release_weights(gm: OptimizedModule) -> str | None:
    """Let go of the parameters that regions keep packed. Each region that has a program may.

    Returns  "" where some are gone, why all are kept, None where the calls so far do not tell
    """
    if gm.optimized_submodules:
        return "PyTorch runs the model's own forward, whose submodules are optimized"
    regions: list[Any] = [r for r in gm.regions().values() if isinstance(r, ZenRegion)]
    if not regions:
        return "no operation of it is in a region"
    if not any(r.lowered or r.packed for r in regions):
        return None
    regions = [r for r in regions if r.lowered and all(r.lowered.values())]  # plain PyTorch needs the others
    if not regions:
        return "PyTorch computes its regions, or they were called with packed sequences"
    if not release(gm, regions):
        return "operations outside of regions read its parameters, or it has none"
    keep_parts(gm)
    return ""


def keep_parts(gm: OptimizedModule) -> None:
    """Let copies of a module whose parameters are gone be made of its graph and its parts."""
    traced, tree = gm._source[0], gm._tree
    guards, example = traced.guards, traced.example
    if guards is not None and example is not None and not traced.restored:
        args, kwargs = example
        guards, example = Guards.described(guards.description()), ((None,) * len(args), dict.fromkeys(kwargs))
    traced = replace(traced, graph=None, guards=guards, example=example, restored=True)
    parts = {name: Part.of(module) for name, module in gm._held.items() if name not in tree._modules}
    gm._source = traced, build_released, {"outer": Outer(copy_graph(gm.graph)), "parts": parts}


def build_released(traced: Traced, *, outer: Outer, parts: Mapping[str, Part]) -> OptimizedModule:
    """Make the module of its graph and its parts."""
    options = {"outer": outer, "parts": parts}
    made = {name: part.make(name, traced.root) for name, part in parts.items()}
    gm = assembled(traced, build_released, options, copy_graph(outer.graph), made)
    gm._released = True
    gm.begin_watch()
    return gm


def assembled(
    traced: Traced, build: Any, options: dict[str, Any], graph: fx.Graph, parts: Mapping[str, nn.Module]
) -> OptimizedModule:
    """The module with this graph, which calls these parts; nothing watches it yet."""
    gm: Any = OptimizedModule(traced, build, options)
    with gm.compiled_once():
        for name, part in parts.items():
            gm.add_submodule(name, part)
        gm._read_from(traced, graph)
    result: OptimizedModule = gm
    return result


class Operator(NamedTuple):
    """Stands for an operator of PyTorch's, which pickle does not take, in a graph."""

    namespace: str
    name: str
    overload: str

    @property
    def operator(self) -> Any:
        return getattr(getattr(getattr(torch.ops, self.namespace), self.name), self.overload)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.operator(*args, **kwargs)


def _with_names(graph: fx.Graph) -> fx.Graph:
    """A copy of the graph that pickle takes, with the notes that a file holds."""

    def name_of(target: Any) -> Any:
        is_operator = isinstance(target, torch._ops.OpOverload)
        return Operator(target.namespace, target._opname, target._overloadname) if is_operator else target

    return _with_targets(graph, name_of)


def _with_operators(graph: fx.Graph) -> fx.Graph:
    """A copy of what _with_names returned, with the operators themselves."""
    return _with_targets(graph, lambda target: target.operator if isinstance(target, Operator) else target)


def _with_targets(graph: fx.Graph, change: Callable[[Any], Any]) -> fx.Graph:
    copied = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = copied.create_node(node.op, change(node.target), args, kwargs, node.name)
        if "source" in node.meta:
            copies[node].meta["source"] = node.meta["source"]
    copied.set_codegen(graph._codegen)
    return copied


@dataclass
class Outer:
    """The graph that calls the parts, as pickle takes it."""

    graph: fx.Graph

    def __getstate__(self) -> dict[str, Any]:
        return {"graph": _with_names(self.graph)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.graph = _with_operators(state["graph"])


@dataclass
class Part:
    """What a module that stands for a part of the graph is made of.

    kind       its class
    constants  packed weights, or the names of what it reads of the tree
    more       what else its class takes
    """

    kind: type[nn.Module]
    graph: fx.Graph
    constants: Kept | tuple[str, ...]
    more: Any

    @classmethod
    def of(cls, module: Any) -> Part:
        """The part that a module stands for."""
        constants = module.constants if isinstance(module.constants, Kept) else tuple(module.constants)
        more = _ALSO[type(module)]
        return cls(type(module), module.graph, constants, getattr(module, more))

    def make(self, name: str, root: nn.Module) -> nn.Module:
        """A module that stands for it. root  the tree that it reads"""
        kept = self.constants
        constants = kept if isinstance(kept, Kept) else Constants(root, kept)
        if self.kind is ZenRegion:
            return ZenRegion(self.graph, constants, name, self.more)
        if self.kind is JoinedOffsetBags:
            return JoinedOffsetBags(self.graph, constants, self.more)
        return Memoised(self.graph, constants, self.more)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: packed weights as in a file."""
        state = {**self.__dict__, "graph": _with_names(self.graph)}
        if isinstance(self.constants, Kept):
            layouts, tensors = Layouts(), Tensors()
            rows = encode_kept(self.constants, layouts, tensors)
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            state["constants"] = rows, layouts.written, copies, self.constants.still
        return {**state, "is_kept": isinstance(self.constants, Kept)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.pop("is_kept"):
            rows, written, tensors, still = state["constants"]
            state["constants"] = decode_kept(rows, Layouts(written), tensors, still)
        self.__dict__.update(state)
        self.graph = _with_operators(self.graph)


# The classes of parts, and what else they take than graph and constants.
_ALSO: dict[type[nn.Module], str] = {ZenRegion: "options", Memoised: "masks", JoinedOffsetBags: "tune"}


def encode_kept(kept: Kept, layouts: Layouts, packed: Tensors) -> dict[str, Any]:
    """What a region's parameters were released to, as JSON by name; the bytes are added to `packed`.

    Packed weights whose layout has no form are written plain.
    """
    rows: dict[str, Any] = {}
    for name, value in kept.plain_by_name.items():
        rows[name] = _plain_row(value, packed)
    for name, (form, shape, dtype) in kept.forms.items():
        try:
            place = layouts.place(form.desc)
        except NoForm:
            rows[name] = _plain_row(kept[name], packed)
            continue
        source = packed_as(as_it_lies(form.data, form.desc.size_bytes), packed)
        rows[name] = [source, tuple(shape), encode(dtype, _no_special), place, form.transposed]
    return rows


def _plain_row(value: torch.Tensor, packed: Tensors) -> list[Any]:
    value = value.detach().contiguous()
    return [packed_as(as_it_lies(value, value.nbytes), packed), tuple(value.shape), encode(value.dtype, _no_special)]


def decode_kept(
    rows: Mapping[str, Any], layouts: Layouts, tensors: Mapping[str, torch.Tensor], still: Iterable[str] = ()
) -> Kept:
    """What encode_kept made rows of. Raises FileError for anything else. still  as Kept has it"""
    plain, forms = {}, {}
    for name, (source, shape, dtype_row, *layout) in rows.items():
        data, dtype, shape = tensors[source], decode(dtype_row, _no_special), torch.Size(shape)
        numel = math.prod(shape)
        if not isinstance(dtype, torch.dtype) or data.dtype != torch.uint8 or any(size < 0 for size in shape):
            raise FileError(f"{name} is no constant")
        if not layout:
            if data.nbytes < numel * dtype.itemsize:
                raise FileError(f"{name} is longer than what is there of it")
            plain[name] = data[: numel * dtype.itemsize].view(dtype).view(shape)
            continue
        place, transposed = layout
        desc = layouts.at(place)
        whole = isinstance(desc, MemoryDesc) and desc.outer_strides is not None and math.prod(desc.dims) == numel
        if not whole or data.nbytes < desc.size_bytes or (transposed and len(desc.dims) != 2):
            raise FileError(f"{name} does not lie as the file says")
        forms[name] = Form(Packed(data, desc, bool(transposed)), shape, dtype)
    return Kept(plain, forms, map(str, still))


def packed_as(tensor: torch.Tensor, packed: Tensors) -> str:
    """The name under which packed weights, bytes as they lie in memory, are in the file."""
    for name, other in packed.items():
        if (other.data_ptr(), other.nbytes) == (tensor.data_ptr(), tensor.nbytes):
            return name
    name = f"{PACKED}{len(packed)}"
    packed[name] = tensor
    return name


def _no_special(value: Any) -> None:
    return None
