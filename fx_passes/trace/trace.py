"""From an nn.Module to a graph over a copy of its module tree.

    model  --skeleton-->  the same tree of new Module objects on the same storage
           --symbolic trace, else torch.export with example inputs, else with some submodules kept whole-->  fx.Graph

nn.Transformer and its parts, nn.MultiheadAttention among them, are one operation each for symbolic tracing: with
example inputs, torch.export goes first. So it does where torch.fx.wrap hides a function with several results, or with
weights.

The user's model is never written to: not by tracing (a forward may store things on self), not by what is later done to
the optimized module (`.to`, hooks, new submodules).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fx_passes.aliasing.effects import is_known_function, may_write_to_held, qualified_name
from fx_passes.graph.graph import is_call
from fx_passes.graph.hooks import hooked_inside, let_outputs_be_collected
from fx_passes.trace.asked import GRADIENTS, states_told, ways_told
from fx_passes.trace.call_kind import kind_of
from fx_passes.trace.compared import differs_on_example
from fx_passes.trace.decisions import decided
from fx_passes.trace.export import StateChanged, export, fill_tables_of_dynamo, is_exported
from fx_passes.trace.guards import Arguments, Call
from fx_passes.trace.named import Named
from fx_passes.trace.outputs import is_plain
from fx_passes.trace.own_memory import own_what_is_written
from fx_passes.trace.quantized_layers import ask_for_dtype
from fx_passes.trace.reached import Reached
from fx_passes.trace.refusals import key_of
from fx_passes.trace.repeated import changes_when_called
from fx_passes.trace.sizes import ALL, ASKED_FOR_NONE, FreeSizes, TimeLeft
from fx_passes.trace.skeleton import skeleton
from fx_passes.trace.state import Snapshot
from fx_passes.trace.states import States, settings_kept
from fx_passes.trace.submodules import POST_PROCESSING, Observed, find_submodules
from fx_passes.trace.symbolic import (
    CHANGES,
    LEFT_OUT,
    ONE_OBJECT,
    refuse_writes_beside_arrays,
    trace_symbolically,
    writes_refused,
)
from fx_passes.trace.traced import WHOLE, Traced, Untraceable, forward_signature
from fx_passes.trace.wrapped import has_wrapped
from zendnn_cffi.errors import is_of_signal_handler
from zendnn_cffi.locks import making

log = logging.getLogger("zendnn_cffi.passes")

ExampleInputs: TypeAlias = Sequence[Any] | Mapping[str, Any] | torch.Tensor | None
# Modules of torch.nn that symbolic tracing takes for one operation, and torch.export takes apart.
_COMPOSITE = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder, nn.TransformerDecoderLayer,
              nn.Transformer, nn.MultiheadAttention)  # fmt: skip
_REASON = 300  # characters of torch.export's messages that are kept
_DETECTOR = "a detector, which keeps as many boxes as the data says: no graph"


def trace(
    model: nn.Module,
    example_inputs: ExampleInputs = None,
    dynamic: bool = True,
    awaits_call: bool = False,
    has_one_graph: bool = False,
) -> Traced:
    """Return the graph of model.forward over a skeleton of the model.

    example_inputs  the arguments of one call (a sequence, or a mapping of keyword arguments); used where symbolic
                    tracing is not enough, and to learn which optional arguments are given
    dynamic         whether torch.export leaves sizes free; symbolic tracing always does
    awaits_call     whether trace_by_call() follows, where an example would tell more than is known without one
    has_one_graph   whether there will be no further graphs for other calls: of two graphs, the one for more calls
    Raises          ValueError for a model in training mode, TraceError for one whose parameters have no shape yet.
    Where the model cannot be traced, the result has no graph, the reason stands in leaves[WHOLE], and submodules that
    can be traced are in submodules. Submodules whose forward changes attributes, lists or globals are leaves, and what
    they write to is their own.
    """
    if model.training and not is_exported(model):
        raise ValueError(
            f"{type(model).__name__} is in training mode, and optimize() keeps evaluation semantics only: call"
            " model.eval() first"
        )
    example = None if example_inputs is None else _as_call(example_inputs)
    sizes, left = (ALL if dynamic else ASKED_FOR_NONE)._replace(has_one_graph=has_one_graph), TimeLeft()
    with making(), settings_kept():  # torch.fx replaces methods of nn.Module meanwhile, for all threads
        traced = _trace(skeleton(model), example, *_specialize(model, example), sizes, left)
        traced.awaits_call = awaits_call and traced.wants_example and not isinstance(model, torch.jit.ScriptModule)
        written = [] if traced.awaits_call else _trace_submodules(traced, example, sizes, left)
    own_what_is_written((traced, *traced.submodules.values()), written)
    return traced


class ExampleRefused(Exception):
    """The model raises on the arguments that were to be its example."""


def trace_by_call(traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Trace the tree again, with these arguments of a call as the example; they are kept. Raises ExampleRefused."""
    root, example, sizes, left = traced.root, (args, kwargs), traced.sizes, TimeLeft()
    with making(), settings_kept():
        found = _trace(root, example, *_specialize(root, example), sizes, left)
        written = _trace_submodules(found, example, sizes, left, is_call=True)
    own_what_is_written((found, *found.submodules.values()), written)
    return found


def trace_kind(
    root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: FreeSizes, by_symbols: bool = False
) -> Traced:
    """The graph of root for calls of the kind that this one is, without one where there is none; both are kept.

    by_symbols  for such calls of all sizes, whatever torch.fx does not look into
    What calls write to is root's still: own_what_is_written() is to be called.
    """
    example = args, kwargs
    with making(), settings_kept():
        return _trace(root, None if by_symbols else example, *_specialize(root, example), sizes, TimeLeft())


def _trace_submodules(
    traced: Traced, example: Call | None, sizes: FreeSizes, left: TimeLeft, is_call: bool = False
) -> list[tuple[str, str]]:
    """Trace the submodules of a model that is no graph; return what a call of the model was seen to write to."""
    if traced.graph is not None:
        return []
    root = traced.root
    observed = Observed(root, None if Snapshot(root).unrepeatable() else example, Reached(root))
    trace_submodule = functools.partial(_trace_submodule, sizes=sizes, left=left)
    traced.submodules.update(find_submodules(root, observed, trace_submodule))
    if is_call and observed.refused and not traced.submodules:
        raise ExampleRefused(traced.leaves[WHOLE])
    inside = f" but for {', '.join(traced.submodules)}" if traced.submodules else ""
    reason = f"{traced.leaves[WHOLE]}{_remedy(example)}"
    log.warning("%s stays plain PyTorch%s: %s", type(root).__name__, inside, reason)
    return observed.written


def _trace_submodule(module: nn.Module, example: Call | None, sizes: FreeSizes, left: TimeLeft) -> Traced | None:
    """The graph over a submodule; None where there is none."""
    traced = _trace(module, example, *_specialize(module, example), sizes, left)
    return None if traced.graph is None else traced


def retrace(traced: Traced) -> Traced:
    """Trace the same module tree again, as it is now."""
    if traced.restored:
        return traced
    with making():
        taken, example = (traced.specialized, traced.given), traced.own_example
        if example is not None:
            taken = _specialize(traced.root, example)
        again = _trace(traced.root, example, *taken, traced.sizes, TimeLeft())
    again.awaits_call, again.kind = traced.awaits_call and again.wants_example, traced.kind
    return again


def _trace(
    root: nn.Module,
    example: Call | None,
    specialized: Mapping[str, Any],
    given: frozenset[str],
    sizes: FreeSizes,
    left: TimeLeft,
) -> Traced:
    """The graph over root itself, or root without one; root is changed by constants that its forward makes alone."""
    if example is not None:
        let_outputs_be_collected(root, example[1])
    traced = _trace_root(root, example, specialized, given, sizes, left)
    if example is not None:
        traced.kind = kind_of(traced.parameters, *example)
    return traced


def _trace_root(
    root: nn.Module,
    example: Call | None,
    specialized: Mapping[str, Any],
    given: frozenset[str],
    sizes: FreeSizes,
    left: TimeLeft,
) -> Traced:
    refused = ""  # why there is no exported graph
    exported, reached = is_exported(root), Reached(root)
    has_composites = any(isinstance(module, _COMPOSITE) for module in root.modules()) or ask_for_dtype(root)
    wants_example = has_composites and example is None and not exported
    if example is not None and (exported or has_composites):
        try:
            return _trace_by_export(root, reached, example, sizes, left)
        except Untraceable as failure:
            refused = str(failure)
    values = _by_name(root, example)
    decides = not sizes.has_one_graph and _takes_images(root, values) and not _detectors(root)
    leaves: dict[str, str] = {}
    stateful: tuple[str, ...] = ()
    written: tuple[tuple[str, str], ...] = ()
    while True:
        try:
            with writes_refused(root):
                traced = _by_symbols(
                    root,
                    reached,
                    leaves=leaves,
                    specialized=specialized,
                    given=given,
                    example=values,
                    decides=decides,
                )
            unseen, several = ("", False) if refused or leaves else _unseen(traced.graph)
            if unseen and (several or not sizes.has_one_graph):
                because = f"torch.fx does not look into {unseen}()"
                log.info("%s: %s", type(root).__name__, because)
                wants_example = example is None
                if example is not None:
                    free = sizes if several else sizes.by_example(because)
                    with contextlib.suppress(Untraceable):
                        return _trace_by_export(root, reached, example, free, left)
            by = example if decided(traced.graph) else None
            return replace(
                traced, stateful=stateful, written=written, sizes=sizes, wants_example=wants_example, decided_by=by
            )
        except Untraceable as failure:
            is_for_export = not (leaves or failure.stateful or failure.is_final)
            wants_example = wants_example or (is_for_export and example is None)
            if example is not None and is_for_export:
                try:
                    if not refused:
                        return _trace_by_export(root, reached, example, sizes, left)
                except Untraceable as other:
                    refused, stateful = str(other), (*stateful, *other.stateful)
                failure.reasons = {path: f"{refused}; symbolically: {text}" for path, text in failure.reasons.items()}
            stateful, written = (*stateful, *failure.stateful), (*written, *failure.written)
            log.info("%s: %s%s", type(root).__name__, failure, _remedy(example))
            leaves = keep_whole(leaves, failure.reasons)
            if WHOLE in leaves:
                wants_example = example is None
                return Traced(
                    root, None, leaves, sizes=sizes, stateful=stateful, written=written, wants_example=wants_example
                )


def _by_symbols(root: nn.Module, reached: Reached, *, decides: bool, **given: Any) -> Traced:
    """The graph that symbolic tracing makes; of functions that torch.fx.wrap hides, too, where the example decides."""
    if decides and has_wrapped(reached.spaces):
        with contextlib.suppress(Untraceable):
            return trace_symbolically(root, reached, decides=True, follows_wrapped=True, **given)
    return trace_symbolically(root, reached, decides=decides, **given)


def _unseen(graph: fx.Graph | None) -> tuple[str, bool]:
    """The name of a function that torch.fx.wrap hides, and whether several results of it are read; "" for none.

    Not even what is a tensor among several is known, so what follows stays outside of regions, too. One that is given
    weights has layers inside: the attention of torchvision's Swin transformers. Of others the graph is taken, as an
    exported one may hold for fewer sizes.
    """
    found = "", False
    for node in () if graph is None else graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, types.FunctionType):
            continue
        if is_known_function(node.target) or all(map(_is_size, node.all_input_nodes)):
            continue
        if any(is_call(user, operator.getitem) for user in node.users):
            return qualified_name(node.target), True
        if any(source.op == "get_attr" for source in node.all_input_nodes):
            found = qualified_name(node.target), False
    return found


def _is_size(node: fx.Node) -> bool:
    """Whether node is a size of a tensor, or computed of sizes, as tracing writes it."""
    if node.op == "call_method":
        return node.target == "size"
    if is_call(node, getattr):
        return node.args[1] == "shape"
    of_python = node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator"
    return of_python and bool(node.all_input_nodes) and all(map(_is_size, node.all_input_nodes))


def keep_whole(leaves: Mapping[str, str], reasons: Mapping[str, str]) -> dict[str, str]:
    """Return leaves with one more for each path: the module itself, or the nearest one around what is kept already."""
    found = dict(leaves)
    for path, reason in reasons.items():
        while leaf := next((leaf for leaf in leaves if leaf == path or path.startswith(f"{leaf}.")), ""):
            path = leaf.rpartition(".")[0]
        found[path] = reason
    return {p: r for p, r in found.items() if not any(p != o and (o == WHOLE or p.startswith(f"{o}.")) for o in found)}


def _trace_by_export(root: nn.Module, reached: Reached, example: Call, sizes: FreeSizes, left: TimeLeft) -> Traced:
    """The exported graph."""
    if detectors := _detectors(root):
        raise Untraceable({detectors[0]: _DETECTOR})
    if hooked := hooked_inside(root):
        raise Untraceable({WHOLE: f"torch.export: {hooked} has hooks, which a graph would not run"})
    fill_tables_of_dynamo()
    try:
        states, ways, flags = set[str](), set[str](), States()
        comparing: list[str] = []
        asking, wondering = states_told(states.add, reached.spaces), ways_told(ways.add)
        answered, comparing_told = reached.answered("type", "isinstance"), reached.comparisons_told(comparing.append)
        hearing = flags.heard(reached.spaces)
        with answered, asking, wondering, comparing_told, hearing, settings_kept(reached.spaces) as set_otherwise:
            graph, guards = export(root, *example, sizes, left)
        if GRADIENTS in states:
            guards.forbid_gradients()
    except StateChanged as error:
        log.info("torch.export: %s", error)
        raise Untraceable(error.changed, tuple(error.changed)) from error
    except Exception as error:  # whatever the model's own code or torch.export raises
        if is_of_signal_handler(error):
            raise
        reason = f"torch.export: {type(error).__name__}: {error}".splitlines()[0][:_REASON]
        log.info("%s", reason)
        raise Untraceable({WHOLE: reason}) from error
    if others := sorted(states - {GRADIENTS}):
        raise Untraceable({WHOLE: f"its forward asks for {others[0]}(), which a graph does not tell"})
    if set_otherwise:
        raise Untraceable({WHOLE: f"its forward sets {set_otherwise[0]}{LEFT_OUT}"})
    if comparing:
        raise Untraceable({WHOLE: f"{comparing[0]}(){ONE_OBJECT}"})
    if (ways or reached.catches_exceptions) and differs_on_example(
        root, graph, example, trusted=not reached.has_near_code
    ):
        why = f"asks for {min(ways)}()" if ways else "catches exceptions"
        raise Untraceable({WHOLE: f"its forward {why}, and computes something else where it is traced"})
    refuse_writes_beside_arrays(graph, root)
    if reached.has_near_code and changes_when_called(root, example, writes=may_write_to_held(graph, root)):
        raise Untraceable({WHOLE: CHANGES}, (WHOLE,))
    read = tuple(flags.read.values())
    if others := [state.name for state in read if not state.holds()]:
        raise Untraceable({WHOLE: f"its forward asks for {others[0]}, which is another while torch.export traces"})
    named = Named.of(root, reached)
    return Traced(root, graph, guards=guards, example=example, sizes=guards.sizes, states=read, named=named)


def _takes_images(root: nn.Module, values: Mapping[str, Any] | None) -> bool:
    """Whether a network of convolutions is given images, and nothing else: they have few sizes.

    Sequences have many, and so have caches: torch.export's graphs serve these by one program.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    has_images = values is not None and len(leaves) == 1 and leaves[0].ndim == 4 and key_of(values) is not None
    return has_images and any(isinstance(module, nn.Conv2d) for module in root.modules())


def _detectors(root: nn.Module) -> list[str]:
    """Modules whose results depend on the numbers in pictures; parts of them are graphs for pictures of all sizes."""
    return [path for path, module in root.named_modules() if hasattr(module, POST_PROCESSING)]


def _remedy(example: Call | None) -> str:
    return "" if example is not None else " (with example_inputs, torch.export would be tried)"


def _as_call(example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor) -> Call:
    """Positional and keyword arguments."""
    if isinstance(example_inputs, Arguments):
        return example_inputs.args, example_inputs.kwargs
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return ((example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)), {}


def _by_name(model: nn.Module, example: Call | None) -> dict[str, Any] | None:
    """The arguments of an example by name."""
    if example is None:
        return None
    return {**dict(zip(forward_signature(model).parameters, example[0], strict=False)), **example[1]}


def _specialize(model: nn.Module, example: Call | None) -> tuple[dict[str, Any], frozenset[str]]:
    """Arguments that forward is likely to branch on: those fixed to a value, those that have to be given."""
    parameters = forward_signature(model).parameters
    values = _by_name(model, example) or {}
    fixed: dict[str, Any] = {}
    given = set()
    for p in parameters.values():
        value = values.get(p.name, p.default)
        if value is p.empty:
            continue
        if value is None or isinstance(value, bool | str) or (value is p.default and not is_plain(value)):
            fixed[p.name] = value
        elif p.name in values and p.default is None:
            given.add(p.name)
    return fixed, frozenset(given)
