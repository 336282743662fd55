"""Whether a document's parts fit each other: calls would stumble over names that stand for nothing."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from fx_passes import ops
from fx_passes.candidates.specs import TensorSpec
from fx_passes.graph.graph import argument, get_attribute
from fx_passes.memoize.memoised import Memoised
from fx_passes.partition.partition import Constants
from fx_passes.region.options import RegionOptions
from fx_passes.saved.errors import FileError
from fx_passes.trace.traced import Traced, forward_signature

TUNE_MODES = ("auto", "off", "full")
_KINDS: dict[Any, Collection[str]] = {
    ops.eltwise: ops.ELTWISE,
    ops.binary: ops.BINARY,
    ops.reduce: ops.REDUCTIONS,
    ops.pool: ("max", "avg_include_padding", "avg_exclude_padding"),
    ops.adaptive_pool: ("avg", "max"),
}
_POST_OPS = {"eltwise": ops.eltwise, "binary": ops.binary}
_FUSING = ops.having(post_ops=True)


def check_graph(traced: Traced, graph: fx.Graph, parts: Mapping[str, nn.Module]) -> None:
    """Raise FileError where the graph names an argument, a tensor or a part's argument that there is not."""
    placeholders = graph.find_nodes(op="placeholder")
    info = getattr(graph._codegen, "pytree_info", None)
    if info is not None and info.in_spec.num_leaves != len(placeholders):
        raise FileError(f"the graph has {len(placeholders)} inputs, its arguments {info.in_spec.num_leaves}")
    if info is None and not _takes_anything(traced):
        names = [str(node.target) for node in placeholders]
        _check_named(names, traced.parameters)
        required = [name for name, default in traced.parameters.items() if default is inspect.Parameter.empty]
        if missing := sorted(set(required).difference(names)):
            raise FileError(f"the graph has no inputs {missing}, which forward takes")
    _check_kinds(graph)
    _check_named(traced.specialized, traced.parameters)
    _check_tensors(traced.root, (str(node.target) for node in graph.find_nodes(op="get_attr")))
    for node in graph.find_nodes(op="call_module"):
        part: Any = parts.get(str(node.target))
        if part is not None and (node.kwargs or len(node.args) != len(part.graph.find_nodes(op="placeholder"))):
            raise FileError(f"{node.target} is called with {len(node.args)} arguments, which are not its own")


def check_part(name: str, part: Any, root: nn.Module) -> None:
    """Raise FileError where a part reads a constant that there is not, or has options that are none."""
    constants = part.constants
    read = {str(node.target) for node in part.graph.find_nodes(op="get_attr")}
    if missing := sorted(read - {*constants}):
        raise FileError(f"{name} reads {missing}, which are not in the file")
    _check_kinds(part.graph)
    if isinstance(constants, Constants):
        _check_tensors(root, constants)
    if isinstance(part, Memoised):
        inputs = len(part.graph.find_nodes(op="placeholder"))
        if type(part.masks) is not int or not 0 <= part.masks <= inputs:
            raise FileError(f"{name} has {inputs} inputs, and {part.masks!r} of them are no masks")
        return
    options = getattr(part, "options", None)
    if not _are_options(options) if isinstance(options, RegionOptions) else part.tune not in TUNE_MODES:
        raise FileError(f"{name} has options that are none: {str(options or part.tune)[:200]}")


def check_inputs(graph: fx.Graph, specs: Sequence[TensorSpec], threads: Any, kinds: Any) -> None:
    """Raise FileError for inputs that no call of a region with this graph has."""
    is_sound = type(threads) is int and threads > 0 and all(isinstance(kind, str) for kind in kinds)
    is_sound &= len(specs) == len(graph.find_nodes(op="placeholder"))
    for spec in specs:
        is_sound &= isinstance(spec.dtype, torch.dtype) and len(spec.shape) == len(spec.strides)
        is_sound &= all(type(number) is int and number >= 0 for number in (*spec.shape, *spec.strides))
    if not is_sound:
        raise FileError(f"no call has such inputs: {str([threads, kinds, *specs])[:200]}")


def _check_kinds(graph: fx.Graph) -> None:
    """Raise FileError for an operation of a kind that there is not, among post-ops, too."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        asked = [(node.target, argument(node, 1 + (node.target is ops.binary), "kind"))]
        for entry in node.kwargs.get("post_ops") or () if node.target in _FUSING else ():
            asked.append((_POST_OPS.get(entry[0]), entry[1]))
        for operation, kind in asked:
            known = _KINDS.get(operation)
            if known is not None and not (isinstance(kind, str) and kind in known):
                raise FileError(f"{node.name}: there is no {operation.__name__} of the kind {str(kind)[:80]!r}")


def _are_options(options: RegionOptions) -> bool:
    return (
        options.dtype in (None, torch.float32, torch.bfloat16)
        and type(options.allow_winograd) is type(options.release_weights) is bool
        and options.tune in TUNE_MODES
        and type(options.tune_seconds) in (int, float)
        and options.tune_seconds >= 0
        and isinstance(options.without, tuple)
        and all(isinstance(kind, str) for kind in options.without)
    )


def _takes_anything(traced: Traced) -> bool:
    """Whether forward has *args or **kwargs."""
    kinds = {parameter.kind for parameter in forward_signature(traced.root).parameters.values()}
    return bool(kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD})


def _check_named(names: Iterable[str], parameters: Mapping[str, Any]) -> None:
    if unknown := sorted(name for name in names if name not in parameters):
        raise FileError(f"forward has no arguments {unknown}: it takes {', '.join(parameters)}")


def _check_tensors(root: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        try:
            found = get_attribute(root, name)
        except AttributeError:
            found = None
        if not isinstance(found, torch.Tensor):
            raise FileError(f"there is no tensor {name[:80]!r} in the file")
