"""From an nn.Module to a graph over a copy of its module tree.

    model  --skeleton-->  the same tree of new Module objects on the same storage
           --symbolic trace, else torch.export with example inputs, else with some submodules kept whole-->  fx.Graph

The user's model is never written to: not by tracing (a forward may store things on self), not by what is later done to
the optimized module (`.to`, hooks, new submodules).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from fx_passes.graph.hooks import let_outputs_be_collected
from fx_passes.trace.call_kind import kind_of
from fx_passes.trace.export import is_exported
from fx_passes.trace.guards import Arguments, Call
from fx_passes.trace.one_thread import following
from fx_passes.trace.outputs import is_plain
from fx_passes.trace.own_memory import own_what_is_written
from fx_passes.trace.reached import Reached
from fx_passes.trace.root import Ways, by_name, remedy
from fx_passes.trace.sizes import ALL, ASKED_FOR_NONE, FreeSizes, TimeLeft
from fx_passes.trace.skeleton import skeleton
from fx_passes.trace.state import Snapshot
from fx_passes.trace.states import settings_kept
from fx_passes.trace.submodules import Observed, find_submodules
from fx_passes.trace.traced import WHOLE, Traced, forward_signature

log = logging.getLogger("zendnn_cffi.passes")

_Taken: TypeAlias = tuple[Mapping[str, Any], frozenset[str]]
ExampleInputs: TypeAlias = Sequence[Any] | Mapping[str, Any] | torch.Tensor | None


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
    with following(), settings_kept():
        traced = _trace(skeleton(model), example, sizes, left)
        traced.awaits_call = awaits_call and traced.wants_example and not isinstance(model, torch.jit.ScriptModule)
        written = [] if traced.awaits_call else _trace_submodules(traced, example, sizes, left)
    own_what_is_written((traced, *traced.submodules.values()), written)
    return traced


class ExampleRefused(Exception):
    """The model raises on the arguments that were to be its example."""


def trace_by_call(traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Trace the tree again, with these arguments of a call as the example; they are kept. Raises ExampleRefused."""
    root, example, sizes, left = traced.root, (args, kwargs), traced.sizes, TimeLeft()
    with following(), settings_kept():
        found = _trace(root, example, sizes, left)
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
    with following(), settings_kept():
        return _trace(root, None if by_symbols else example, sizes, TimeLeft(), _specialize(root, example))


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
    reason = f"{traced.leaves[WHOLE]}{remedy(example)}"
    log.warning("%s stays plain PyTorch%s: %s", type(root).__name__, inside, reason)
    return observed.written


def _trace_submodule(module: nn.Module, example: Call | None, sizes: FreeSizes, left: TimeLeft) -> Traced | None:
    """The graph over a submodule; None where there is none."""
    traced = _trace(module, example, sizes, left)
    return None if traced.graph is None else traced


def retrace(traced: Traced) -> Traced:
    """Trace the same module tree again, as it is now."""
    if traced.restored:
        return traced
    with following():
        example = traced.own_example
        taken = (traced.specialized, traced.given) if example is None else None
        again = _trace(traced.root, example, traced.sizes, TimeLeft(), taken)
    again.awaits_call, again.kind = traced.awaits_call and again.wants_example, traced.kind
    return again


def _trace(
    root: nn.Module, example: Call | None, sizes: FreeSizes, left: TimeLeft, taken: _Taken | None = None
) -> Traced:
    """The graph over root itself, or root without one; root is changed by constants that its forward makes alone.

    taken  as _specialize() says of the example, where another call is to decide it
    """
    if example is not None:
        let_outputs_be_collected(root, example[1])
    traced = Ways(root, example, _specialize(root, example) if taken is None else taken, sizes, left).traced()
    if example is not None:
        traced.kind = kind_of(traced.parameters, *example)
    return traced


def _as_call(example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor) -> Call:
    """Positional and keyword arguments."""
    if isinstance(example_inputs, Arguments):
        return example_inputs.args, example_inputs.kwargs
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return ((example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)), {}


def _specialize(model: nn.Module, example: Call | None) -> _Taken:
    """Arguments that forward is likely to branch on: those fixed to a value, those that have to be given."""
    parameters = forward_signature(model).parameters
    values = by_name(model, example) or {}
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
