"""From an nn.Module to a graph over a copy of its module tree.

    model  --skeleton-->  the same tree of new Module objects on the same storage
           --symbolic trace, else torch.export with example inputs, else with some submodules kept whole-->  fx.Graph

nn.Transformer and its parts are one operation each for symbolic tracing: with example inputs, torch.export goes first.

The user's model is never written to: not by tracing (a forward may store things on self), not by what is later done to
the optimized module (`.to`, hooks, new submodules).
"""

from __future__ import annotations

import copy
import inspect
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.nn.utils import parametrizations, parametrize

from fx_passes.export import Call, Guards, export
from fx_passes.graph import CREATED, copy_graph
from fx_passes.normalize.effects import writes

log = logging.getLogger("zendnn_cffi.passes")

ExampleInputs: TypeAlias = Sequence[Any] | Mapping[str, Any] | torch.Tensor | None
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Modules of torch.nn that symbolic tracing takes for one operation, and torch.export takes apart.
_COMPOSITE = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder, nn.TransformerDecoderLayer,
              nn.Transformer)  # fmt: skip
_REASON = 300  # characters of torch.export's messages that are kept
WHOLE = ""  # the name of the root among the leaves: the model as a whole stays as it is


def forward_signature(model: nn.Module) -> inspect.Signature:
    """The signature of model.forward; (*args, **kwargs) where Python cannot say, as for TorchScript."""
    try:
        return inspect.signature(model.forward)
    except ValueError:
        return inspect.signature(lambda *args, **kwargs: None)


class TraceError(RuntimeError):
    """The model cannot become a graph; the message says where and why."""


@dataclass
class Traced:
    """What trace returns.

    root         owns parameters and submodules under their original names
    graph        refers to them; None where the model stays whole
    leaves       submodule kept whole -> reason
    specialized  optional argument -> the only value the graph is right for
    given        optional arguments that the graph needs (the example had a tensor for them, not the default)
    guards       conditions on the inputs that torch.export found the graph to rest on
    example      the example inputs, where the graph was made from them
    """

    root: nn.Module
    graph: fx.Graph | None
    leaves: dict[str, str] = field(default_factory=dict)
    specialized: dict[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    guards: Guards | None = None
    example: Call | None = None

    def arrange(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The call's arguments as the graph takes them; None where it does not compute what the model would."""
        if (self.specialized or self.given) and not self._agrees(args, kwargs):
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
            if other is not value and (type(other) is not type(value) or other != value):
                return False
        return all(values.get(name) is not None for name in self.given)

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
        return replace(self, root=root, graph=self.graph and copy_graph(self.graph))

    def __getstate__(self) -> dict[str, Any]:
        """An exported graph is not picklable; it is made again from the example."""
        state = dict(self.__dict__)
        if self.example is not None:
            state.update(graph=None, guards=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.example is not None:
            self.graph, self.guards = export(self.root, skeleton(self.root), *self.example)


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward."""
    return any(getattr(module, name, None) for name in HOOKS)


def skeleton(model: nn.Module) -> nn.Module:
    """Return a deep copy of the module tree whose parameters and buffers are new objects on the model's storage.

    Ties (a module or parameter reachable by two names) stay ties.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):
                raise TraceError(
                    f"parameter {name!r} of {type(module).__name__} has no shape yet (a lazy module): call the model"
                    " once on an input first, then optimize it"
                )
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = _alias(parameter)
        for value in [*module._buffers.values(), *module.__dict__.values()]:
            if isinstance(value, torch.Tensor):
                memo.setdefault(id(value), value.detach() if type(value) is torch.Tensor else value)
    return copy.deepcopy(model, memo)


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """A new Parameter on the same storage; a subclass (quantized, distributed, ...) is shared as it is."""
    if type(parameter) is not nn.Parameter:
        return parameter
    return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)


class InPlaceProxy(fx.Proxy):
    """A Proxy that also records augmented assignment as what it is: fx.Proxy makes x = x + y of x += y."""

    def _record(self, target: Callable[..., Any], *args: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", target, (self, *args), {})

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self._record(operator.iadd, other)

    def __isub__(self, other: Any) -> fx.Proxy:
        return self._record(operator.isub, other)

    def __imul__(self, other: Any) -> fx.Proxy:
        return self._record(operator.imul, other)

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self._record(operator.itruediv, other)

    def __setitem__(self, item: Any, value: Any) -> None:
        self._record(operator.setitem, item, value)


class SubmoduleTracer(fx.Tracer):
    """Symbolic tracer that remembers in which submodule tracing failed, and keeps given submodules whole."""

    def __init__(self, leaves: Mapping[str, str], specialized: Mapping[str, Any]) -> None:
        super().__init__()
        # Without this a buffer is read, and written, as the tensor it is while tracing.
        self.proxy_buffer_attributes = True
        self.leaves = leaves
        self.specialized = specialized
        self.failed: str | None = None

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return InPlaceProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            module_qualified_name in self.leaves
            or has_hooks(m)
            or isinstance(m, torch.jit.ScriptModule)
            or (super().is_leaf_module(m, module_qualified_name) and not is_parametrization(m))
        )

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.failed is None:
                self.failed = self.path_of_module(m)
            raise

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: dict[str, Any] | tuple[Any, ...] | None = None
    ) -> tuple[Any, list[Any]]:
        root_fn, args = super().create_args_for_root(root_fn, is_module, concrete_args)
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
    Where nothing can be traced, the result has no graph and the reason stands in leaves[WHOLE].
    """
    if model.training:
        raise ValueError(
            f"{type(model).__name__} is in training mode, and optimize() keeps evaluation semantics only: call"
            " model.eval() first"
        )
    args, kwargs = _as_call(example_inputs)
    specialized, given = _specialize(model, args, kwargs)
    if example_inputs is not None and any(isinstance(module, _COMPOSITE) for module in model.modules()):
        exported = _try_export(model, args, kwargs)
        if isinstance(exported, Traced):
            return exported
    leaves: dict[str, str] = {}
    while True:
        try:
            return _trace_symbolically(model, leaves, specialized, given)
        except _Untraceable as failure:
            if example_inputs is not None and not leaves:
                exported = _try_export(model, args, kwargs)
                if isinstance(exported, Traced):
                    return exported
                failure = _Untraceable(failure.submodule, f"{exported}; symbolically: {failure}")
            if failure.submodule is None or failure.submodule in leaves:
                log.warning("%s stays plain PyTorch: %s%s", type(model).__name__, failure, _remedy(example_inputs))
                return Traced(skeleton(model), None, {WHOLE: str(failure)})
            log.info("%s stays one module: %s%s", failure.submodule, failure, _remedy(example_inputs))
            leaves[failure.submodule] = str(failure)


class _Untraceable(Exception):
    """Symbolic tracing failed, in this submodule (None: in the root)."""

    def __init__(self, submodule: str | None, reason: str) -> None:
        super().__init__(reason)
        self.submodule = submodule


def _trace_symbolically(
    model: nn.Module, leaves: Mapping[str, str], specialized: Mapping[str, Any], given: frozenset[str]
) -> Traced:
    traced_root = skeleton(model)
    tracer = SubmoduleTracer(leaves, specialized)
    rng = torch.get_rng_state()
    try:
        graph = tracer.trace(traced_root)
    except Exception as error:  # whatever the model's own code raises when it meets a Proxy
        raise _Untraceable(tracer.failed, f"{type(error).__name__}: {error}".splitlines()[0]) from error
    if not torch.equal(rng, torch.get_rng_state()):
        torch.set_rng_state(rng)
        raise _Untraceable(None, "its forward draws random numbers that a graph would freeze")
    root, read = skeleton(model), list(graph.find_nodes(op="get_attr"))
    # those that forward creates, which the tracer left on its root
    created = {node.target for node in read if "." not in node.target and not hasattr(root, node.target)}
    for node in read:
        if node.target in created:
            setattr(root, node.target, getattr(traced_root, node.target))
            node.meta[CREATED] = True
    _refuse_writes_to_created(graph, root)
    return Traced(root, graph, dict(leaves), dict(specialized), given)


def _refuse_writes_to_created(graph: fx.Graph, root: nn.Module) -> None:
    """Raise where forward writes to a tensor that it makes: it was made, and perhaps read, once, while tracing."""
    for node in graph.nodes:
        if any(written.meta.get(CREATED) for written in writes(node, root, unknown=False)):
            path = next(reversed(node.meta.get("nn_module_stack") or {"": None}))
            raise _Untraceable(path or None, "its forward writes to a tensor that it makes, which a graph makes once")


def _try_export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced | str:
    """The exported graph, or why there is none."""
    root = skeleton(model)
    try:
        graph, guards = export(root, skeleton(model), args, kwargs)
    except Exception as error:  # whatever the model's own code or torch.export raises
        reason = f"torch.export: {type(error).__name__}: {error}".splitlines()[0][:_REASON]
        log.info("%s", reason)
        return reason
    return Traced(root, graph, guards=guards, example=(args, kwargs))


def _remedy(example_inputs: ExampleInputs) -> str:
    return "" if example_inputs is not None else " (with example_inputs, torch.export would be tried)"


def _as_call(example_inputs: ExampleInputs) -> Call:
    """Positional and keyword arguments."""
    if example_inputs is None:
        return (), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return ((example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)), {}


def _specialize(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], frozenset[str]]:
    """Arguments that forward is likely to branch on: those fixed to a value, those that have to be given."""
    parameters = forward_signature(model).parameters
    values = {**dict(zip(parameters, args, strict=False)), **kwargs}
    fixed: dict[str, Any] = {}
    given = set()
    for p in parameters.values():
        value = values.get(p.name, p.default)
        if value is None or isinstance(value, bool | str):
            fixed[p.name] = value
        elif p.name in values and p.default is None:
            given.add(p.name)
    return fixed, frozenset(given)
