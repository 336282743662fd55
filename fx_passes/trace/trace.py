"""From an nn.Module to a graph over a copy of its module tree.

    model  --skeleton-->  the same tree of new Module objects on the same storage
           --symbolic trace, else torch.export with example inputs, else with some submodules kept whole-->  fx.Graph

nn.Transformer and its parts, nn.MultiheadAttention among them, are one operation each for symbolic tracing: with
example inputs, torch.export goes first. So it does where torch.fx.wrap hides a function with several results.

The user's model is never written to: not by tracing (a forward may store things on self), not by what is later done to
the optimized module (`.to`, hooks, new submodules).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import operator
import threading
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.nn.utils import parametrizations, parametrize

from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.aliasing.effects import is_known_function, qualified_name, writes
from fx_passes.graph.graph import CREATED, copy_graph, is_call
from fx_passes.graph.hooks import computed_weights, has_hooks
from fx_passes.trace.compared import differs_on_example
from fx_passes.trace.export import Arguments, Call, Guards, StateChanged, export, is_exported
from fx_passes.trace.extremes import extremes_recorded
from fx_passes.trace.kinds import Assumption, Kinds
from fx_passes.trace.outputs import needs_remaking, remake
from fx_passes.trace.proxies import Questions, RecordingProxy
from fx_passes.trace.reached import Reached, gradient_mode_told
from fx_passes.trace.recurrent import graph_of_recurrent
from fx_passes.trace.seeding import refuse_seeding
from fx_passes.trace.skeleton import own_state, own_tensor, skeleton
from fx_passes.trace.state import Snapshot
from fx_passes.trace.submodules import POST_PROCESSING, find_submodules
from fx_passes.trace.tuples import in_tuples
from zendnn_cffi.locks import making

log = logging.getLogger("zendnn_cffi.passes")

ExampleInputs: TypeAlias = Sequence[Any] | Mapping[str, Any] | torch.Tensor | None
# Modules of torch.nn that symbolic tracing takes for one operation, and torch.export takes apart.
_COMPOSITE = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder, nn.TransformerDecoderLayer,
              nn.Transformer, nn.MultiheadAttention)  # fmt: skip
_REASON = 300  # characters of torch.export's messages that are kept
_ONE_OBJECT = " asks whether values are one object, which a graph does not tell"
_DETECTOR = "a detector, which keeps as many boxes as the data says: no graph"
WHOLE = ""  # the name of the root among the leaves: the model as a whole stays as it is


def forward_signature(model: nn.Module) -> inspect.Signature:
    """The signature of model.forward; (*args, **kwargs) where Python cannot say, as for TorchScript."""
    saved = getattr(model, "saved_signature", None)  # of a module that was loaded, whose forward takes anything
    if isinstance(saved, inspect.Signature):
        return saved
    try:
        return inspect.signature(model.forward)
    except ValueError:
        return inspect.signature(lambda *args, **kwargs: None)


@dataclass
class Traced:
    """What trace returns.

    root         owns parameters and submodules under their original names
    graph        refers to them; None where the model stays whole
    leaves       submodule kept whole -> reason
    specialized  optional argument -> the only value the graph is right for
    given        optional arguments that the graph needs (the example had a tensor for them, not the default)
    assumed      further conditions on arguments, as code asked what they are while it was traced
    guards       conditions on the inputs that torch.export found the graph to rest on
    example      the example inputs, where the graph was made from them
    stateful     submodules whose forward was seen to change more than its result
    restored     whether the graph comes from a file, and cannot be made again
    submodules   path -> a submodule that is a graph, where the model is none
    dtype        the default dtype while it was traced: of tensors that forward makes, and of results of integers
    """

    root: nn.Module
    graph: fx.Graph | None
    leaves: dict[str, str] = field(default_factory=dict)
    specialized: dict[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    assumed: tuple[Assumption, ...] = ()
    guards: Guards | None = None
    example: Call | None = None
    stateful: tuple[str, ...] = ()
    restored: bool = False
    submodules: dict[str, Traced] = field(default_factory=dict)
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    def arrange(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The call's arguments as the graph takes them; None where it does not compute what the model would."""
        if (self.specialized or self.given or self.assumed) and not self._agrees(args, kwargs):
            return None
        if self.guards is None or self.example is None:
            return args, kwargs
        ordered = self._as_in_example(args, kwargs)
        return ordered if ordered is not None and self.guards.hold(*ordered) else None

    def _agrees(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the arguments are those that the trace took for granted."""
        values = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        for name, value in self.specialized.items():
            other = values.get(name, self.parameters[name])
            if other is not value and not (type(other) is type(value) and _is_plain(value) and other == value):
                return False
        if not all(values.get(name) is not None for name in self.given):
            return False
        return all(assumption.holds(values) for assumption in self.assumed)

    def _as_in_example(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The same call with the arguments by position that the example had there; None where others are given."""
        assert self.example is not None
        by_position, by_name = self.example
        if len(args) == len(by_position) and kwargs.keys() == by_name.keys():
            return args, {name: kwargs[name] for name in by_name}
        expected = [*list(self.parameters)[: len(by_position)], *by_name]
        values = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        if self._has_var_positional or values.keys() != set(expected):
            return None
        n = len(by_position)
        return tuple(values[name] for name in expected[:n]), {name: values[name] for name in expected[n:]}

    @cached_property
    def _has_var_positional(self) -> bool:
        kinds = (p.kind for p in forward_signature(self.root).parameters.values())
        return inspect.Parameter.VAR_POSITIONAL in kinds

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """Parameters of forward in order, with their defaults."""
        return {p.name: p.default for p in forward_signature(self.root).parameters.values()}

    def copy(self, root: nn.Module) -> Traced:
        """The same graph over another module tree of the same structure."""
        submodules = {path: traced.copy(root.get_submodule(path)) for path, traced in self.submodules.items()}
        return replace(self, root=root, graph=self.graph and copy_graph(self.graph), submodules=submodules)

    def __getstate__(self) -> dict[str, Any]:
        """An exported graph is not picklable; it is made again from the example."""
        state = dict(self.__dict__)
        if self.example is not None and not self.restored:
            state.update(graph=None, guards=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.example is not None and not self.restored:
            self.graph, self.guards = export(self.root, *self.example)


class SubmoduleTracer(fx.Tracer):
    """Symbolic tracer that remembers in which submodule tracing failed, and keeps given submodules whole."""

    def __init__(
        self,
        root: nn.Module,
        reached: Reached,
        leaves: Mapping[str, str],
        specialized: Mapping[str, Any],
        example: Mapping[str, Any] | None,
    ) -> None:
        super().__init__()
        self.questions = Questions(Kinds(root, example), lambda: self.scope.module_path)
        self.reached = reached
        # Without this a buffer is read, and written, as the tensor it is while tracing.
        self.proxy_buffer_attributes = True
        self.leaves = leaves
        self.specialized = specialized
        self.failed: str | None = None
        self.thread = threading.get_ident()
        self.autocast = torch.is_autocast_enabled("cpu")

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return RecordingProxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        raise self.questions.refuse("symbolically traced variables cannot be used as inputs to control flow")

    def refuse_gradient_mode(self) -> None:
        """A graph is called with and without gradients."""
        raise self.questions.refuse("its forward asks whether gradients are enabled")

    def note_comparison(self, name: str) -> None:
        """A result of eager may be its own operand, or another one that was returned before."""
        self.questions.refuse(f"{name}(){_ONE_OBJECT}")

    def keys(self, obj: fx.Proxy) -> Any:
        raise self.questions.refuse("the keys of a traced value")

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if torch.is_autocast_enabled("cpu") != self.autocast:
            raise NotImplementedError("its forward switches autocast, which a graph would leave out")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if not needs_remaking(a):
            return super().create_arg(a)
        function, values = remake(a)
        return self.create_node("call_function", function, tuple(self.create_arg(value) for value in values), {})

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            module_qualified_name in self.leaves
            or has_hooks(m)
            or isinstance(m, torch.jit.ScriptModule)
            or (
                super().is_leaf_module(m, module_qualified_name)
                and not is_parametrization(m)
                and not computed_weights(m)
            )
        )

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:  # modules that other threads call meanwhile come here, too
            return forward(*args, **kwargs)
        if self.reached.unclear and not self.is_leaf_module(m, path := self.path_of_module(m)):
            unclear = self.reached.why_unclear(m)
            if unclear is not None:
                self.failed = self.failed or path
                raise NotImplementedError(unclear)
        before = {name: m.__dict__[name] for name in computed_weights(m) if name in m.__dict__}
        try:
            return in_tuples(m, super().call_module(m, forward, args, kwargs), args, kwargs)
        except Exception:
            if self.failed is None:
                self.failed = self.path_of_module(m)
            raise
        finally:
            m.__dict__.update(before)  # in place of what hooks computed of the graph's values

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: dict[str, Any] | tuple[Any, ...] | None = None
    ) -> tuple[Any, list[Any]]:
        root_fn, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        for arg in args:
            if isinstance(arg, fx.Proxy) and arg.node.args and not _is_plain(arg.node.args[0]):
                arg.node.args = (None,)  # generated code cannot write it; it is specialized
        return root_fn, [
            self.specialized[arg.node.target]
            if isinstance(arg, fx.Proxy) and arg.node.target in self.specialized
            else arg
            for arg in args
        ]


def is_parametrization(module: nn.Module) -> bool:
    """Whether module computes its parameters from others, or is what computes them: traced through, that is folded."""
    parts_of_it = type(module).__module__ in (parametrize.__name__, parametrizations.__name__)
    return parts_of_it or parametrize.is_parametrized(module)


def trace(model: nn.Module, example_inputs: ExampleInputs = None) -> Traced:
    """Return the graph of model.forward over a skeleton of the model.

    example_inputs  the arguments of one call (a sequence, or a mapping of keyword arguments); used where symbolic
                    tracing is not enough, and to learn which optional arguments are given
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
    with making():  # torch.fx replaces methods of nn.Module meanwhile, for all threads
        traced = _trace(skeleton(model), example, *_specialize(model, example))
        if traced.graph is None:
            traced.submodules.update(find_submodules(traced.root, example, _trace_submodule))
            inside = f" but for {', '.join(traced.submodules)}" if traced.submodules else ""
            reason = f"{traced.leaves[WHOLE]}{_remedy(example)}"
            log.warning("%s stays plain PyTorch%s: %s", type(model).__name__, inside, reason)
    for each in (traced, *traced.submodules.values()):
        _own_what_is_written(each)
    return traced


def _trace_submodule(module: nn.Module, example: Call | None) -> Traced | None:
    """The graph over a submodule; None where there is none."""
    traced = _trace(module, example, *_specialize(module, example))
    return None if traced.graph is None else traced


def retrace(traced: Traced) -> Traced:
    """Trace the same module tree again, as it is now."""
    if traced.restored:
        return traced
    with making():
        if traced.example is not None:
            return _trace(traced.root, traced.example, *_specialize(traced.root, traced.example))
        return _trace(traced.root, None, traced.specialized, traced.given)


def _trace(root: nn.Module, example: Call | None, specialized: Mapping[str, Any], given: frozenset[str]) -> Traced:
    """The graph over root itself, or root without one; root is changed by constants that its forward makes alone."""
    refused = ""  # why there is no exported graph
    exported, reached = is_exported(root), Reached(root)
    if example is not None and (exported or any(isinstance(module, _COMPOSITE) for module in root.modules())):
        try:
            return _trace_by_export(root, reached, example)
        except _Untraceable as failure:
            refused = str(failure)
    leaves: dict[str, str] = {}
    stateful: tuple[str, ...] = ()
    while True:
        try:
            traced = _trace_symbolically(root, reached, leaves, specialized, given, _by_name(root, example))
            if example is not None and not refused and not leaves and (name := _unseen_function(traced.graph)):
                log.info("%s: torch.fx does not look into %s()", type(root).__name__, name)
                with contextlib.suppress(_Untraceable):
                    return _trace_by_export(root, reached, example)
            return replace(traced, stateful=stateful)
        except _Untraceable as failure:
            if example is not None and not leaves and not failure.stateful:
                try:
                    if not refused:
                        return _trace_by_export(root, reached, example)
                except _Untraceable as other:
                    refused, stateful = str(other), (*stateful, *other.stateful)
                failure.reasons = {path: f"{refused}; symbolically: {text}" for path, text in failure.reasons.items()}
            stateful = (*stateful, *failure.stateful)
            log.info("%s: %s%s", type(root).__name__, failure, _remedy(example))
            leaves = keep_whole(leaves, failure.reasons)
            if WHOLE in leaves:
                return Traced(root, None, leaves, stateful=stateful)


def _unseen_function(graph: fx.Graph | None) -> str:
    """The name of a function that torch.fx.wrap hides, and of which several results are read; "" where there is none.

    Not even what is a tensor among these is known, so what follows stays outside of regions, too. Of functions with
    one result the graph is taken: an exported one may hold for fewer sizes.
    """
    for node in () if graph is None else graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, types.FunctionType):
            continue
        several = any(is_call(user, operator.getitem) for user in node.users)
        if several and not is_known_function(node.target) and not all(map(_is_size, node.all_input_nodes)):
            return qualified_name(node.target)
    return ""


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


class _Untraceable(Exception):
    """Why there is no graph: path of a submodule (WHOLE: the root) -> reason.

    stateful  paths of modules whose state was changed by tracing them
    """

    def __init__(self, reasons: Mapping[str, str], stateful: Sequence[str] = ()) -> None:
        super().__init__("; ".join(f"{path or 'the model'}: {reason}" for path, reason in reasons.items()))
        self.reasons = dict(reasons)
        self.stateful = tuple(stateful)


def _trace_symbolically(
    root: nn.Module,
    reached: Reached,
    leaves: Mapping[str, str],
    specialized: Mapping[str, Any],
    given: frozenset[str],
    example: Mapping[str, Any] | None,
) -> Traced:
    traced_root = skeleton(root, own_state=True)
    tracer = SubmoduleTracer(traced_root, reached, leaves, specialized, example)
    before, rng = Snapshot(traced_root), torch.get_rng_state()
    try:
        if (unclear := tracer.reached.why_unclear(root)) is not None:
            raise NotImplementedError(unclear)
        asking = gradient_mode_told(tracer.refuse_gradient_mode)
        comparing = tracer.reached.comparisons_told(tracer.note_comparison)
        with refuse_seeding(), extremes_recorded(), tracer.reached.answered("type", "callable"), asking, comparing:
            graph = graph_of_recurrent(traced_root, specialized) or tracer.trace(traced_root)
        tracer.questions.settle()
        draws = not torch.equal(rng, torch.get_rng_state())
        changed = before.changed()
    except Exception as error:  # whatever the model's own code raises when it meets a Proxy
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise _Untraceable({**tracer.questions.refused, tracer.failed or WHOLE: reason}) from error
    finally:
        torch.set_rng_state(rng)
        before.restore_shared()
    if tracer.questions.refused:  # and caught by what asked
        raise _Untraceable(tracer.questions.refused)
    if draws:
        raise _Untraceable({WHOLE: "its forward draws random numbers that a graph would freeze"})
    if changed:
        raise _Untraceable(changed, tuple(changed))
    read = list(graph.find_nodes(op="get_attr"))
    # those that forward creates, which the tracer left on its root
    created = {node.target for node in read if "." not in node.target and not hasattr(root, node.target)}
    for node in read:
        if node.target in created:
            node.meta[CREATED] = True
    _refuse_writes_to_created(graph, traced_root)
    for name in created:
        setattr(root, name, getattr(traced_root, name))
    required = [p.name for p in forward_signature(root).parameters.values() if p.default is p.empty]
    if tracer.reached.compares_arguments_to_none:
        named = {str(node.target) for node in graph.find_nodes(op="placeholder")}
        tracer.questions.kinds.assume_given(name for name in required if name in named and name not in specialized)
    assumed = tuple(tracer.questions.kinds.assumed.values())
    return Traced(root, graph, dict(leaves), dict(specialized), given, assumed=assumed)


def _refuse_writes_to_created(graph: fx.Graph, root: nn.Module) -> None:
    """Raise where forward writes to a tensor that it makes: it was made, and perhaps read, once, while tracing."""
    for node in graph.nodes:
        if any(written.meta.get(CREATED) for written in writes(node, root, unknown=False)):
            path = next(reversed(node.meta.get("nn_module_stack") or {"": None}))
            raise _Untraceable({path: "its forward writes to a tensor that it makes, which a graph makes once"})


def _trace_by_export(root: nn.Module, reached: Reached, example: Call) -> Traced:
    """The exported graph."""
    if detectors := [path for path, module in root.named_modules() if hasattr(module, POST_PROCESSING)]:
        raise _Untraceable({detectors[0]: _DETECTOR})
    try:
        asked: list[None] = []
        comparing: list[str] = []
        asking = gradient_mode_told(lambda: asked.append(None))
        with reached.answered("type", "isinstance"), asking, reached.comparisons_told(comparing.append):
            graph, guards = export(root, *example)
        if asked:
            guards.forbid_gradients()
    except StateChanged as error:
        log.info("torch.export: %s", error)
        raise _Untraceable(error.changed, tuple(error.changed)) from error
    except Exception as error:  # whatever the model's own code or torch.export raises
        reason = f"torch.export: {type(error).__name__}: {error}".splitlines()[0][:_REASON]
        log.info("%s", reason)
        raise _Untraceable({WHOLE: reason}) from error
    if comparing:
        raise _Untraceable({WHOLE: f"{comparing[0]}(){_ONE_OBJECT}"})
    if reached.catches_exceptions and differs_on_example(root, graph, example):
        raise _Untraceable({WHOLE: "its forward catches exceptions, and computes something else without numbers"})
    return Traced(root, graph, guards=guards, example=example)


def _own_what_is_written(traced: Traced) -> None:
    """Give what a call writes to storage of its own: the model that was copied keeps its values."""
    for path in traced.stateful:
        own_state(traced.root.get_submodule(path))
    if traced.graph is None or not any(writes(node, traced.root, unknown=False) for node in traced.graph.nodes):
        return
    aliasing = Aliasing(fx.GraphModule(traced.root, copy_graph(traced.graph)))
    for node in aliasing.gm.graph.find_nodes(op="get_attr"):
        if aliasing.is_written(node):
            owner, _, name = str(node.target).rpartition(".")
            own_tensor(traced.root.get_submodule(owner), name)


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
        if value is None or isinstance(value, bool | str) or (value is p.default and not _is_plain(value)):
            fixed[p.name] = value
        elif p.name in values and p.default is None:
            given.add(p.name)
    return fixed, frozenset(given)


def _is_plain(value: Any) -> bool:
    """Whether generated code can write a value, and == tells all about it."""
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, torch.dtype, torch.device)
