"""An optimized module as a document and tensors, and back.

    OptimizedModule -> {graph, parts: regions and what else it calls, tree, programs} + parameters + packed weights

A loaded module is an OptimizedModule, too: it was traced, and its passes ran, where it was saved.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fx_passes.graph.hooks import HOOKS
from fx_passes.module import OptimizedModule
from fx_passes.region.keep import lowered_to_keep
from fx_passes.region.kept import Kept
from fx_passes.region.region import ZenRegion
from fx_passes.saved.arguments import decode_arguments, encode_arguments
from fx_passes.saved.container import padded
from fx_passes.saved.errors import FileError, NotSaved
from fx_passes.saved.graphs import decode_graph, encode_graph
from fx_passes.saved.layouts import Layouts
from fx_passes.saved.parts import decode_part, encode_part
from fx_passes.saved.plain_run import PlainRun
from fx_passes.saved.released import assembled, keep_parts
from fx_passes.saved.signatures import SavedPrograms, encode_lowered
from fx_passes.saved.tree import decode_tree, encode_tree
from fx_passes.trace.traced import WHOLE, Traced
from zendnn_cffi.primitives.verification.records import machine

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
    described = {name: encode_part(name, part, layouts, packed) for name, part in parts.items()}
    for node in gm.graph.find_nodes(op="call_module"):
        if node.target not in described:
            kind = type(gm.get_submodule(str(node.target))).__name__
            raise NotSaved(f"its submodule {node.target} ({kind}) stays plain PyTorch, whose code a file does not hold"
                           f"{_because(gm.leaves.get(str(node.target), ''))}")  # fmt: skip
    reading = [part.graph for part in parts.values() if not isinstance(part.constants, Kept)]
    rows, tensors = encode_tree(tree, [gm.graph, *reading])
    programs = {
        name: [encode_lowered(kept, part, layouts, packed, tensors) for kept in lowered_to_keep(part, threads)]
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
        "arguments": encode_arguments(traced),
        "programs": programs,
        "layouts": layouts.written,
    }
    return document, {**{name: padded(tensor) for name, tensor in packed.items()}, **tensors}


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def decode_module(document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> OptimizedModule:
    """Return the module that encode_module took apart. Raises FileError for what it did not write."""
    try:
        if document["version"] != VERSION:
            raise FileError(
                f"the file is of version {document['version']}, this package reads version {VERSION}: save it again"
            )
        root = decode_tree(document["tree"], tensors)
        traced = Traced(root, None, restored=True, **decode_arguments(document["arguments"]))
        layouts = Layouts(document["layouts"])
        kept = {key: document[key] for key in ("graph", "parts")}
        parts = {name: decode_part(name, row, root, layouts, tensors) for name, row in document["parts"].items()}
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
    return _restored(traced, document, {name: decode_part(name, row, traced.root, Layouts(), {}) for name, row in rows})


def _restored(traced: Traced, document: Mapping[str, Any], parts: Mapping[str, nn.Module]) -> OptimizedModule:
    root: Any = traced.root
    graph = decode_graph(document["graph"])
    missing = {str(node.target) for node in graph.find_nodes(op="call_module")} - parts.keys()
    if missing:
        raise FileError(f"the graph calls {sorted(missing)}, which are not in the file")
    gm = assembled(traced, build_restored, {"document": document}, graph, parts)
    root.run = PlainRun(traced, graph, parts)
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
