"""Graphs as JSON, and back: a list of nodes in order, [op, name, target, args, kwargs, source]."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from fx_passes.saved.encoding import decode, encode
from fx_passes.saved.errors import FileError, NotSaved
from fx_passes.saved.functions import check_arguments, check_method, function_of, name_of
from fx_passes.trace.outputs import Remake, TakenApart

_CACHES = "transformers.cache_utils"  # the module of what decoders keep keys and values in
_REMAKES = "make "  # what the target of a node begins with that puts results together: their structure follows
_OPS = ("placeholder", "get_attr", "call_function", "call_method", "call_module", "output")


def encode_graph(graph: fx.Graph) -> dict[str, Any]:
    """Return the graph as JSON. Raises NotSaved for what has no form."""

    def special(value: Any) -> Any:
        return ["node", value.name] if isinstance(value, fx.Node) else None

    nodes = []
    for node in graph.nodes:
        target: Any = node.target
        try:
            if isinstance(target, Remake):
                target = _REMAKES + dump_structure(target.structure)
            elif node.op == "call_function":
                target = name_of(target)
            elif node.op == "call_method":
                check_method(target, NotSaved)
            check_arguments(node.target, node.args, NotSaved)
            args, kwargs = encode(tuple(node.args), special), encode(dict(node.kwargs), special)
        except NotSaved as reason:
            raise NotSaved(f"it calls {reason} (node {node.name})") from None
        nodes.append([node.op, node.name, target, args, kwargs, str(node.meta.get("source", ""))])
    return {"nodes": nodes, "structure": _encode_structure(graph)}


def decode_graph(data: Any) -> fx.Graph:
    """Return the graph that encode_graph made data of. Raises FileError for anything else."""
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}

    def special(value: list[Any]) -> Any:
        if value[0] != "node":
            return None
        if len(value) != 2 or value[1] not in known:
            raise FileError(f"a node reads {str(value[1:])[:80]}, which comes later or never")
        return known[value[1]]

    try:
        for op, name, target, args, kwargs, source in data["nodes"]:
            if op not in _OPS or not isinstance(name, str) or name in known or not isinstance(target, str):
                raise FileError(f"no node is written as {str([op, name, target])[:80]}")
            function: Any = target
            if op == "call_function" and target.startswith(_REMAKES):
                function = Remake("results", load_structure(target.removeprefix(_REMAKES)))
            elif op == "call_function":
                function = function_of(target)
            elif op == "call_method":
                check_method(target, FileError)
            arguments, named = decode(args, special), decode(kwargs, special)
            if not isinstance(arguments, tuple) or not isinstance(named, dict):
                raise FileError(f"node {name} has no arguments")
            check_arguments(function, arguments, FileError)
            node = known[name] = graph.create_node(op, function, arguments, named, name)
            if node.name != name:
                raise FileError(f"no node may have the name {name[:80]!r}")
            if source:
                node.meta["source"] = source
        _decode_structure(graph, data["structure"])
        graph.lint()
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"a graph in the file cannot be read ({type(error).__name__}: {error})") from error
    return graph


def _encode_structure(graph: fx.Graph) -> Any:
    """How arguments and results are taken apart and put together, where the generated code uses torch's pytree."""
    info = getattr(graph._codegen, "pytree_info", None)
    if info is None:
        return None
    return [
        list(info.orig_args),
        dump_structure(info.in_spec),
        None if info.out_spec is None else dump_structure(info.out_spec),
    ]


def _decode_structure(graph: fx.Graph, data: Any) -> None:
    if data is None:
        return
    names, in_spec, out_spec = data
    if not all(isinstance(name, str) and name.isidentifier() for name in names):
        raise FileError("an argument has no name")
    read = None if out_spec is None else load_structure(out_spec)
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(names, load_structure(in_spec), read)))


def dump_structure(spec: pytree.TreeSpec) -> str:
    """Return the structure of arguments or results as text. Raises NotSaved for containers that have no name."""
    try:
        text = pytree.treespec_dumps(spec)
        if pytree.treespec_loads(text) != spec:
            raise ValueError("keys of dictionaries that are no text or numbers")
        return text
    except Exception as error:  # whatever a container's own code raises
        classes = list(dict.fromkeys(_objects(spec)))
        inside = ", ".join(f"a {cls.__name__}" for cls in classes) or str(error)
        way = "save a module around it, which takes and returns the tensors in it"
        if any(cls.__module__ == _CACHES for cls in classes):  # decoders return it unasked
            way = f"optimize the model with model.config.use_cache = False, which leaves it out, or {way}"
        raise NotSaved(f"its arguments or results hold what a file does not: {inside}; {way}") from error


def _objects(spec: pytree.TreeSpec) -> Iterator[type]:
    """The classes of objects that results hold."""
    if spec.type is TakenApart:
        yield spec.context.cls
    for child in spec.children():
        yield from _objects(child)


def load_structure(text: Any) -> pytree.TreeSpec:
    """Return the structure that dump_structure made text of. Raises FileError, also for a container unknown here."""
    try:
        if "transformers.modeling_outputs." in text:  # which registers what models return
            importlib.import_module("transformers.modeling_outputs")
        return pytree.treespec_loads(text)
    except Exception as error:  # whatever PyTorch raises for what it did not write
        raise FileError(
            "the file has arguments or results in a container that is unknown here: import the library that defines it"
            f" first, such as transformers ({type(error).__name__}: {error})"
        ) from error
