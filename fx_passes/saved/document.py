"""An optimized module as a document and tensors, and back.

    OptimizedModule -> {tree, graphs with their parts and programs} + parameters + packed weights

Its own graph is in the document itself, those for other kinds of calls are in a list. All read the same tensors.
A loaded module is an OptimizedModule, too: it was traced, and its passes ran, where it was saved.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from fx_passes.graph.hooks import HOOKS
from fx_passes.graph.int8_tensor import is_int8_tensor
from fx_passes.module import OptimizedModule
from fx_passes.region.call_time import share_call_time
from fx_passes.region.keep import lowered_to_keep, saved_keys
from fx_passes.region.kept import Kept
from fx_passes.region.region import ZenRegion
from fx_passes.saved.arguments import decode_arguments, encode_arguments
from fx_passes.saved.container import padded
from fx_passes.saved.errors import FileError, NotSaved
from fx_passes.saved.graphs import decode_graph, encode_graph
from fx_passes.saved.layers import encode_layer
from fx_passes.saved.layouts import Layouts
from fx_passes.saved.parts import decode_part, encode_part
from fx_passes.saved.plain_run import PlainGraph
from fx_passes.saved.references import check_graph
from fx_passes.saved.released import assembled, keep_parts
from fx_passes.saved.signatures import SavedPrograms, encode_lowered, saved_for, signatures_in
from fx_passes.saved.tree import Restored, check_reads, decode_tree, encode_tree, is_layer
from fx_passes.trace.traced import WHOLE, Traced
from zendnn_cffi.engine.library import is_available, unavailable_reason
from zendnn_cffi.errors import LibraryError, is_of_signal_handler
from zendnn_cffi.primitives.verification.records import machine
from zendnn_cffi.values import dataclass

log = logging.getLogger("zendnn_cffi.saved")

VERSION, WITH_KINDS = 2, 3  # of one graph, of several; raise them when the meaning of a document changes


@dataclass(frozen=True)
class Written:
    """One graph of a module as JSON.

    row      which calls it is for, the graph, and the parts that it calls
    reading  the graphs that read parameters
    """

    gm: OptimizedModule
    row: dict[str, Any]
    parts: dict[str, Any]
    reading: list[fx.Graph]


def encode_module(
    gm: OptimizedModule, threads: Sequence[int] | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[str]]:
    """Return the module as JSON, and its tensors by name: packed weights first.

    Its regions are lowered again for each signature that they were called with, with everything measured.
    threads  the numbers of threads to lower for (None: those of the calls)
    Returns  also which further graphs a file cannot hold, and why
    Raises   NotSaved for what a file cannot hold of the module's own graph
    """
    traced, tree = gm._source[0], gm._tree
    if traced.awaits_call:
        raise NotSaved("it came without example inputs, and is traced by its first call: call it once before")
    if any(getattr(gm, name, None) for name in HOOKS):
        raise NotSaved("it has hooks, whose code a file does not hold")
    layouts, packed, held = Layouts(), dict[str, torch.Tensor](), list[torch.Tensor]()
    first = _for_all_sizes(gm)
    graphs, left_out = [_written(first, layouts, packed)], list[str]()
    for module in gm.call_kinds.modules:
        if module is first:
            continue
        try:
            graphs.append(_written(module, layouts, packed))
        except NotSaved as reason:
            left_out.append(f"{module._source[0].calls}: {reason}")
    encode = partial(encode_lowered, layouts=layouts, packed=packed, held=held)
    rows, tensors = encode_tree(tree, [graph for each in graphs for graph in each.reading])
    for each in graphs:
        _call_once(each)
        each.row["programs"] = {
            name: [encode(kept, part, tensors) for kept in lowered_to_keep(part, threads)]
            for name, part in each.parts.items()
            if isinstance(part, ZenRegion)
        }
    own, *further = (each.row for each in graphs)
    document = {
        "version": WITH_KINDS if further else VERSION,
        "released": gm.is_released,
        "machine": machine(),
        "tree": rows,
        "layouts": layouts.written,
        **own,
        **({"kinds": further} if further else {}),
    }
    return document, {**{name: padded(tensor) for name, tensor in packed.items()}, **tensors}, left_out


def _for_all_sizes(gm: OptimizedModule) -> OptimizedModule:
    """The module whose graph is to be the file's own: conditions of torch.export's are data."""
    decided_by = gm._source[0].decided_by
    if decided_by is None:
        return gm
    found = gm.call_kinds.for_all_sizes(gm)
    if found is None:
        raise NotSaved("the sizes of its example decided which way it goes, and torch.export makes no graph of it")
    seen = gm._source[0].refusals
    for args in () if seen is None or not found._only_reads else seen.calls():
        if found._source[0].arrange(args, {}) is not None:
            _run(found, args, {})
    return found


def _written(gm: OptimizedModule, layouts: Layouts, packed: dict[str, torch.Tensor]) -> Written:
    """One graph, without what its regions were lowered to. Raises NotSaved."""
    traced, tree = gm._source[0], gm._tree
    if traced.graph is None and not traced.restored:
        why = gm.leaves.get(WHOLE, "it could not be traced")
        way = f"; save its submodules {', '.join(traced.submodules)} one by one" if traced.submodules else ""
        raise NotSaved(f"it stays plain PyTorch as a whole: {why}{way}")
    if traced.decided_by is not None:
        raise NotSaved("the sizes of its example decided which way it goes")
    parts: dict[str, Any] = {name: part for name, part in gm._held.items() if name not in tree._modules}
    described = {name: encode_part(name, part, layouts, packed) for name, part in parts.items()}
    for name in sorted({str(node.target) for node in gm.graph.find_nodes(op="call_module")} - described.keys()):
        _check_layer(gm, name)
    reading = [gm.graph, *(part.graph for part in parts.values() if not isinstance(part.constants, Kept))]
    check_reads(tree, reading)
    if traced.example is not None:
        with torch.no_grad():
            traced.arrange(*traced.example)  # whose sizes are known to be right then, where no call came
    row = {"graph": encode_graph(gm.graph), "parts": described, "arguments": encode_arguments(traced)}
    return Written(gm, row, parts, reading)


def _call_once(graph: Written) -> None:
    """Have regions lowered for the example, where none was: the first call of a kind is plain PyTorch's."""
    gm, example = graph.gm, graph.gm._source[0].example
    regions = [part for part in graph.parts.values() if isinstance(part, ZenRegion)]
    if example is None or not gm._only_reads or not regions or any(region.lowered for region in regions):
        return
    _run(gm, *example)


def _run(gm: OptimizedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Have regions lowered for a call."""
    rng = torch.get_rng_state()
    with torch.inference_mode(False), torch.no_grad():
        try:
            gm.run_graph(*args, **kwargs)
        except Exception as error:  # whatever the model raises
            if is_of_signal_handler(error):
                raise
            log.info("nothing is lowered for %s: %s: %s", gm._source[0].calls, type(error).__name__, error)
        finally:
            torch.set_rng_state(rng)


def _check_layer(gm: OptimizedModule, name: str) -> None:
    """Raise NotSaved for a submodule that stays plain PyTorch, unless it is one of PyTorch's own layers."""
    try:
        encode_layer(gm.get_submodule(name))
    except NotSaved as reason:
        because = f", as {gm.leaves[name]}" if gm.leaves.get(name) else ""
        module = gm.get_submodule(name)
        way = "optimize what torch.export.export(model, example_inputs) returns, which holds PyTorch's operators alone"
        if any(map(is_int8_tensor, module.parameters(recurse=False))):  # torchao's operators would be in there
            way = "torchao's quantize_() of a model in float32 makes layers that files hold"
        raise NotSaved(
            f"its submodule {name} ({type(module).__name__}) stays plain PyTorch{because}, and a file does not hold"
            f" {reason}: {way}"
        ) from None


def decode_module(document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> OptimizedModule:
    """Return the module that encode_module took apart: plain PyTorch, where there is no library.

    Raises FileError for what encode_module did not write; LibraryError for released parameters without a library.
    """
    if document.get("released") is True and not is_available():
        what = "the file holds packed weights alone, and what packed them is not here"
        raise LibraryError(f"{what}: {unavailable_reason()}")
    try:
        rows = [document, *_further(document)]
        root, layouts = decode_tree(document["tree"], tensors), Layouts(document["layouts"])
        gm, *further = (_decode_graph(number, row, root, layouts, tensors) for number, row in enumerate(rows))
        if document["released"]:
            gm._released = True
            keep_parts(gm)
        gm.begin_watch()
        for module in (gm, *further):
            share_call_time(module)
        for module in further:
            gm.call_kinds.adopt(gm, module)
        if not is_available():
            pass
        elif document["machine"] == machine():
            told = set[int]()
            for module, row in zip((gm, *further), rows, strict=True):
                _give_programs(module, row["programs"], layouts, tensors, told)
        else:
            log.warning(
                "saved on %s, loaded on %s: implementations are chosen, and weights packed, again in the first call."
                " Save it on this machine, too.", document["machine"], machine()
            )  # fmt: skip
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"the file cannot be read ({type(error).__name__}: {error})") from error
    return gm


def _further(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows of further graphs."""
    version, further = document["version"], document.get("kinds", [])
    if version not in (VERSION, WITH_KINDS):
        raise FileError(
            f"the file is of version {version}, this package reads versions {VERSION} and {WITH_KINDS}: save it again"
        )
    if not isinstance(further, list) or bool(further) != (version == WITH_KINDS) or (further and document["released"]):
        raise FileError(f"a file of version {version} has no such further graphs")
    return further


def _decode_graph(
    number: int, row: Mapping[str, Any], root: Restored, layouts: Layouts, tensors: Mapping[str, torch.Tensor]
) -> OptimizedModule:
    traced = Traced(root, None, restored=True, **decode_arguments(row["arguments"]))
    if clashing := row["parts"].keys() & root._modules.keys():
        raise FileError(f"{sorted(clashing)} are parts and submodules at once")
    parts = {name: decode_part(name, part, root, layouts, tensors) for name, part in row["parts"].items()}
    document = {"graph": row["graph"], "parts": row["parts"], "signatures": signatures_in(row["programs"])}
    return _restored(traced, document, number, parts)


def build_restored(traced: Traced, *, document: Mapping[str, Any], number: int) -> OptimizedModule:
    """Make the module of the graph and the parts in the document: its passes ran before it was saved.

    number  the graph's place in the file
    """
    rows = document["parts"].items()
    parts = {name: decode_part(name, row, traced.root, Layouts(), {}) for name, row in rows}
    gm = _restored(traced, document, number, parts)
    gm.begin_watch()
    return gm


def _restored(
    traced: Traced, document: Mapping[str, Any], number: int, parts: Mapping[str, nn.Module]
) -> OptimizedModule:
    """The module of one graph; nothing watches it yet."""
    root: Any = traced.root
    graph = decode_graph(document["graph"])
    called = {str(node.target) for node in graph.find_nodes(op="call_module")} - parts.keys()
    if missing := [name for name in sorted(called) if not is_layer(root, name)]:
        raise FileError(f"the graph calls {missing}, which are not in the file")
    check_graph(traced, graph, parts)
    for name, signatures in document["signatures"].items():
        region: Any = parts[name]
        region.saved_for = saved_for(signatures, region.graph)
        saved_keys(region)  # raises where they are no inputs of this region
    gm = assembled(traced, build_restored, {"document": document, "number": number}, graph, parts)
    root.plain_run.graphs[number] = PlainGraph(traced, graph, parts)
    return gm


def _give_programs(
    gm: OptimizedModule,
    programs: Mapping[str, Sequence[Mapping[str, Any]]],
    layouts: Layouts,
    tensors: Mapping[str, torch.Tensor],
    told: set[int],
) -> None:
    """Let regions have the programs and the packed weights of the file."""
    for name, rows in programs.items():
        region: Any = gm._held[name]
        given = {}
        for row in rows:
            for key, digest, transposed, source in row.get("weights", ()):
                given[key, digest, transposed] = tensors[source]
        region.weights.give(given)
        region.known = SavedPrograms(rows, layouts, told)
