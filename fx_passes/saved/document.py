"""An optimized module as a document and tensors, and back.

    OptimizedModule -> {graph, parts: regions and what else it calls, tree, programs} + parameters + packed weights

A loaded module is an OptimizedModule, too: it was traced, and its passes ran, where it was saved.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fx_passes.bags.offset_bags import JoinedOffsetBags
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.graph.hooks import HOOKS
from fx_passes.graph.interpreter import call_node, run
from fx_passes.lower.context import NotLowered
from fx_passes.memoize.memoised import Memoised
from fx_passes.module import OptimizedModule
from fx_passes.partition.partition import Constants
from fx_passes.plan.prepack import as_it_lies, layout_digest
from fx_passes.region.keep import ToKeep, lowered_to_keep
from fx_passes.region.kept import Kept
from fx_passes.region.lowered import LoweredRegion, sliced
from fx_passes.region.options import RegionOptions
from fx_passes.region.region import ZenRegion
from fx_passes.saved.container import padded
from fx_passes.saved.encoding import decode, encode
from fx_passes.saved.errors import FileError, NotSaved
from fx_passes.saved.graphs import decode_graph, dump_structure, encode_graph, load_structure
from fx_passes.saved.layouts import Layouts
from fx_passes.saved.programs import Context, decode_program, encode_program, packed_weights
from fx_passes.saved.released import assembled, decode_kept, encode_kept, keep_parts, packed_as
from fx_passes.saved.tree import decode_tree, encode_tree
from fx_passes.trace.assumptions import Assumption, Bare, Present
from fx_passes.trace.guards import Description, Guards
from fx_passes.trace.sizes import ALL, Free, FreeSizes
from fx_passes.trace.states import State
from fx_passes.trace.traced import WHOLE, Traced
from zendnn_cffi.collector import collector_paused
from zendnn_cffi.primitives.verification.records import machine
from zendnn_cffi.runtime.sliced_program import SlicedProgram

log = logging.getLogger("zendnn_cffi.saved")

VERSION = 2  # raise it when the meaning of a document changes


def encode_module(
    gm: OptimizedModule, threads: Sequence[int] | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the module as JSON, and its tensors by name: packed weights first.

    Its regions are lowered again for each signature that they were called with, with everything measured.
    threads  the numbers of threads to lower for (None: those of the calls)
    Raises  NotSaved for what a file cannot hold
    """
    traced, tree = gm._source[0], gm._tree
    if traced.awaits_call:
        raise NotSaved("it came without example inputs, and is traced by its first call: call it once before")
    if any(getattr(gm, name, None) for name in HOOKS):
        raise NotSaved("it has hooks, whose code a file does not hold")
    if traced.graph is None and not traced.restored:
        raise NotSaved(f"it stays plain PyTorch as a whole: {gm.leaves.get(WHOLE, 'it could not be traced')}")
    parts: dict[str, Any] = {name: part for name, part in gm._held.items() if name not in tree._modules}
    layouts = Layouts()
    packed: dict[str, torch.Tensor] = {}
    described = {name: _encode_part(name, part, layouts, packed) for name, part in parts.items()}
    for node in gm.graph.find_nodes(op="call_module"):
        if node.target not in described:
            kind = type(gm.get_submodule(str(node.target))).__name__
            raise NotSaved(f"its submodule {node.target} ({kind}) stays plain PyTorch, whose code a file does not hold"
                           f"{_because(gm.leaves.get(str(node.target), ''))}")  # fmt: skip
    reading = [part.graph for part in parts.values() if not isinstance(part.constants, Kept)]
    rows, tensors = encode_tree(tree, [gm.graph, *reading])
    programs = {
        name: [_encode_kept(kept, part, layouts, packed, tensors) for kept in lowered_to_keep(part, threads)]
        for name, part in parts.items()
        if isinstance(part, ZenRegion)
    }
    document = {
        "version": VERSION,
        "released": gm.is_released,
        "machine": machine(),
        "graph": encode_graph(gm.graph),
        "parts": described,
        "tree": rows,
        "arguments": _encode_arguments(traced),
        "programs": programs,
        "layouts": layouts.written,
    }
    return document, {**{name: padded(tensor) for name, tensor in packed.items()}, **tensors}


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _encode_part(name: str, part: Any, layouts: Layouts, packed: dict[str, torch.Tensor]) -> dict[str, Any]:
    row = {"graph": encode_graph(part.graph), "constants": [*part.constants]}
    if isinstance(part, ZenRegion):
        options = part.options
        values = {field.name: encode(getattr(options, field.name), lambda _: None) for field in fields(options)}
        if isinstance(part.constants, Kept):
            row["kept"] = encode_kept(part.constants, layouts, packed)
            row["still"] = list(part.constants.still)
        return {**row, "kind": "region", "options": values}
    if isinstance(part, Memoised):
        return {**row, "kind": "memoised", "masks": part.masks}
    if isinstance(part, JoinedOffsetBags):
        return {**row, "kind": "bags", "tune": part.tune}
    raise NotSaved(f"its submodule {name} ({type(part).__name__}) is none that a file holds")


def _decode_part(
    name: str, row: Mapping[str, Any], root: nn.Module, layouts: Layouts, tensors: Mapping[str, torch.Tensor]
) -> nn.Module:
    graph = decode_graph(row["graph"])
    constants: Any = Constants(root, tuple(row["constants"]))
    if "kept" in row:
        constants = decode_kept(row["kept"], layouts, tensors, row.get("still", ()))
        if missing := {str(node.target) for node in graph.find_nodes(op="get_attr")} - {*constants}:
            raise FileError(f"{name} reads {sorted(missing)}, which are not in the file")
    match row["kind"]:
        case "region":
            values = {key: decode(value, lambda _: None) for key, value in row["options"].items()}
            return ZenRegion(graph, constants, name, RegionOptions(**values))
        case "memoised":
            return Memoised(graph, constants, row["masks"])
        case "bags":
            return JoinedOffsetBags(graph, constants, row["tune"])
    raise FileError(f"no part of a module is {str(row['kind'])[:80]!r}")


# ---- which calls the graph is right for


def _encode_arguments(traced: Traced) -> dict[str, Any]:
    try:
        fixed = {name: encode(value, lambda _: None) for name, value in traced.specialized.items()}
    except NotSaved as reason:
        raise NotSaved(f"it was traced for {reason}") from None
    rows: dict[str, Any] = {"specialized": fixed, "given": sorted(traced.given)}
    if traced.assumed:
        rows["assumed"] = [_encode_assumption(assumption) for assumption in traced.assumed]
    if traced.states:
        rows["states"] = [encode(tuple(state), lambda _: None) for state in traced.states]
    if traced.guards is None or traced.example is None:
        return rows
    args, kwargs = traced.example
    found = traced.guards.description()
    try:
        values = [encode(tuple(leaf) if tensor else leaf, lambda _: None) for tensor, leaf in found.leaves]
    except NotSaved as reason:
        raise NotSaved(f"it was exported with {reason}") from None
    tensors = [tensor for tensor, _ in found.leaves]
    guards: dict[str, Any] = {
        "structure": dump_structure(found.structure),
        "leaves": values,
        "tensors": tensors,
        "sizes": found.sizes,
        "conditions": found.conditions,
    }
    if found.without_gradients:
        guards["without_gradients"] = True
    if traced.sizes != ALL:
        guards["free"] = [int(traced.sizes.free), traced.sizes.because]
    return {**rows, "guards": guards, "positional": len(args), "keywords": [*kwargs]}


_KINDS = {
    kind.__name__: kind
    for kind in (torch.Tensor, nn.Parameter, bool, int, float, complex, str, list, tuple, dict, Bare, Present)
}


def _encode_assumption(assumption: Assumption) -> list[Any]:
    name, path, kind = assumption
    if isinstance(kind, type) and kind not in _KINDS.values():
        raise NotSaved(f"it was traced for an argument of class {kind.__name__}")
    return [name, encode(path, lambda _: None), kind.__name__ if isinstance(kind, type) else kind]


def _decode_assumption(row: Any) -> Assumption:
    name, path, kind = row
    if kind is not None and type(kind) is not int:
        if kind not in _KINDS:
            raise FileError(f"no class of an argument is {str(kind)[:80]!r}")
        kind = _KINDS[kind]
    return Assumption(str(name), decode(path, lambda _: None), kind)


def _decode_state(row: Any) -> State:
    found = decode(row, lambda _: None)
    if not isinstance(found, tuple) or len(found) != 4 or not isinstance(found[2], tuple) or not State(*found).is_known:
        raise FileError(f"no flag of PyTorch's is {str(found)[:80]!r}")
    return State(*found)


def _decode_sizes(row: Any) -> FreeSizes:
    if row is None:
        return ALL
    if not isinstance(row, list) or len(row) != 2 or type(row[0]) is not int or not isinstance(row[1], str):
        raise FileError(f"no sizes are free by {str(row)[:80]!r}")
    try:
        return FreeSizes(Free(row[0]), row[1])
    except ValueError as error:
        raise FileError(f"no sizes are free by {row[0]}") from error


def _decode_arguments(data: Mapping[str, Any]) -> dict[str, Any]:
    """Those of Traced."""
    fixed = {name: decode(value, lambda _: None) for name, value in data["specialized"].items()}
    assumed = tuple(_decode_assumption(row) for row in data.get("assumed", ()))
    states = tuple(_decode_state(row) for row in data.get("states", ()))
    found: dict[str, Any] = {"specialized": fixed, "given": frozenset(data["given"]), "assumed": assumed}
    found["states"] = states
    if "guards" in data:
        row = data["guards"]
        leaves = [(tensor, decode(v, lambda _: None)) for tensor, v in zip(row["tensors"], row["leaves"], strict=True)]
        found["guards"] = Guards.described(
            Description(
                load_structure(row["structure"]),
                leaves,
                sizes=row["sizes"],
                conditions=row.get("conditions"),
                without_gradients=row.get("without_gradients") is True,
            )
        )
        found["sizes"] = _decode_sizes(row.get("free"))
        found["example"] = ((None,) * data["positional"], dict.fromkeys(data["keywords"]))
    return found


# ---- programs and packed weights


def _encode_kept(
    kept: ToKeep,
    region: ZenRegion,
    layouts: Layouts,
    packed: dict[str, torch.Tensor],
    plain: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """What a region was lowered to for one signature; packed weights are added to `packed`.

    plain  the parameters that are in the file under their own names
    """
    inputs = [[list(s.shape), encode(s.dtype, lambda _: None), list(s.strides)] for s in kept.inputs]
    row: dict[str, Any] = {"threads": kept.threads, "inputs": inputs, "kinds": list(kept.kinds)}
    if kept.lowered is None:
        return {**row, "plain": kept.reason}
    assert kept.lowered.lowering is not None
    program = kept.lowered.program
    originals = {tensor.data_ptr(): name for name, tensor in plain.items() if tensor.nbytes}
    weights, seen = [], set[tuple[str, str, bool]]()
    for wanted in packed_weights(kept.lowered.lowering):
        key = wanted.key, layout_digest(wanted.desc), wanted.transposed
        if key in seen:
            continue
        seen.add(key)
        tensor = region.weights.get(wanted)
        name = originals.get(tensor.data_ptr())
        if name is None or wanted.desc.size_bytes > plain[name].nbytes:
            name = packed_as(as_it_lies(tensor, wanted.desc.size_bytes), packed)
        weights.append([*key, name])
    size = program.slice_size if isinstance(program, SlicedProgram) else None
    return {**row, "slice": size, "weights": weights, "program": encode_program(kept.lowered, layouts)}


class SavedPrograms:
    """What a region of a loaded module was lowered to, for some signatures.

    rows  of the document; one that does not fit here is forgotten, with a warning
    used  how many became programs
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], layouts: Layouts) -> None:
        self._rows = [(_inputs_of(row), row) for row in rows]
        self._layouts = layouts
        self.used = 0

    def __call__(
        self, region: ZenRegion, inputs: Sequence[torch.Tensor], kinds: tuple[str, ...], keep: bool
    ) -> LoweredRegion | None:
        """As fx_passes.region.keep.Known."""
        for entry in self._rows:
            saved, row = entry
            if (
                row["threads"] == torch.get_num_threads()
                and tuple(row["kinds"]) == kinds
                and _fits(saved, inputs, region)
            ):
                break
        else:
            return None
        if "plain" in row:
            raise NotLowered(row["plain"])
        context = Context(region.constants, region.weights, region.options)
        try:
            lowered = self._decode(row, saved, region, context, keep)
        except Exception as error:  # whatever does not fit any longer: it is lowered as if nothing had been saved
            log.warning("%s: what was saved cannot be used (%s: %s)", region.name, type(error).__name__, error)
            self._rows.remove(entry)
            return None
        self.used += 1
        return lowered

    def _decode(
        self, row: Mapping[str, Any], saved: Sequence[TensorSpec], region: ZenRegion, context: Context, keep: bool
    ) -> LoweredRegion:
        def lower(inputs: Sequence[TensorSpec]) -> LoweredRegion:
            with collector_paused():
                return decode_program(row["program"], inputs, context, self._layouts, keep)

        if row["slice"] is None:
            return lower(saved)
        graph = region.graph_for(tuple(row["kinds"]))
        return sliced(row["slice"], RegionValues(graph, saved, region.constants), saved, graph, lower)


def _inputs_of(row: Mapping[str, Any]) -> list[TensorSpec]:
    return [
        TensorSpec(tuple(shape), decode(dtype, lambda _: None), tuple(strides))
        for shape, dtype, strides in row["inputs"]
    ]


def _fits(saved: Sequence[TensorSpec], inputs: Sequence[torch.Tensor], region: ZenRegion) -> bool:
    """Whether a program for the saved inputs is one for these."""
    if len(saved) != len(inputs):
        return False
    for number, (spec, tensor) in enumerate(zip(saved, inputs, strict=True)):
        if region.key_of(number, tensor) != region.key_of(number, spec):
            return False
    return True


# ---- loading


def decode_module(document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> OptimizedModule:
    """Return the module that encode_module took apart. Raises FileError for what it did not write."""
    try:
        if document["version"] != VERSION:
            raise FileError(
                f"the file is of version {document['version']}, this package reads version {VERSION}: save it again"
            )
        root = decode_tree(document["tree"], tensors)
        traced = Traced(root, None, restored=True, **_decode_arguments(document["arguments"]))
        layouts = Layouts(document["layouts"])
        kept = {key: document[key] for key in ("graph", "parts")}
        parts = {name: _decode_part(name, row, root, layouts, tensors) for name, row in document["parts"].items()}
        gm = _restored(traced, kept, parts)
        if document["released"]:
            gm._released = True
            keep_parts(gm)
            gm.begin_watch()
        _give_programs(gm, document, layouts, tensors)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"the file cannot be read ({type(error).__name__}: {error})") from error
    return gm


def build_restored(traced: Traced, *, document: Mapping[str, Any]) -> OptimizedModule:
    """Make the module of the graph and the parts in the document: its passes ran before it was saved."""
    rows = document["parts"].items()
    return _restored(
        traced, document, {name: _decode_part(name, row, traced.root, Layouts(), {}) for name, row in rows}
    )


def _restored(traced: Traced, document: Mapping[str, Any], parts: Mapping[str, nn.Module]) -> OptimizedModule:
    root: Any = traced.root
    graph = decode_graph(document["graph"])
    missing = {str(node.target) for node in graph.find_nodes(op="call_module")} - parts.keys()
    if missing:
        raise FileError(f"the graph calls {sorted(missing)}, which are not in the file")
    gm = assembled(traced, build_restored, {"document": document}, graph, parts)
    root.run = _PlainRun(traced, graph, parts)
    gm.begin_watch()
    return gm


def _give_programs(
    gm: OptimizedModule, document: Mapping[str, Any], layouts: Layouts, tensors: Mapping[str, torch.Tensor]
) -> None:
    if document["machine"] != machine():
        log.warning(
            "saved on %s, loaded on %s: implementations are chosen, and weights packed, again in the first call."
            " Save it on this machine, too.", document["machine"], machine()
        )  # fmt: skip
        return
    for name, rows in document["programs"].items():
        region: Any = gm._held[name]
        given = {}
        for row in rows:
            for key, digest, transposed, source in row.get("weights", ()):
                given[key, digest, transposed] = tensors[source]
        region.weights.give(given)
        region.known = SavedPrograms(rows, layouts)


class _PlainRun:
    """The model as plain PyTorch: its graph, with regions as what they compute."""

    def __init__(self, traced: Traced, graph: fx.Graph, parts: Mapping[str, nn.Module]) -> None:
        self._traced, self._graph, self._parts = traced, graph, parts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arranged = self._traced.arrange(args, kwargs)
        if arranged is None:
            raise ValueError(
                "this module was saved for other arguments: call the original with these once, before it is saved, or"
                " optimize the original for them"
            )
        args, kwargs = arranged
        info = getattr(self._graph._codegen, "pytree_info", None)
        if info is not None:
            flat, _ = pytree.tree_flatten((args, kwargs))
            return pytree.tree_unflatten(self._run(flat), info.out_spec)
        placeholders = self._graph.find_nodes(op="placeholder")
        given = dict(zip((str(node.target) for node in placeholders), args, strict=False)) | kwargs
        defaults = {str(node.target): node.args[0] for node in placeholders if node.args}
        return self._run([(defaults | given)[str(node.target)] for node in placeholders])

    def _run(self, flat: Sequence[Any]) -> Any:
        return run(self._graph, self._traced.root, flat, self._call)

    def _call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if node.op != "call_module":
            return call_node(node, args, kwargs)
        part: Any = self._parts[str(node.target)]
        return run(part.graph, part.constants, args)  # by the parameters as they are: parts keep what was made of them
