"""From an nn.Module to a graph over a copy of its module tree.

    model  --skeleton-->  the same tree of new Module objects on the same storage  --symbolic trace-->  fx.Graph

The user's model is never written to: not by tracing (a forward may store things on self), not by what is later done to
the optimized module (`.to`, hooks, new submodules). Submodules whose forward tracing cannot follow stay leaves.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

log = logging.getLogger("zendnn_cffi.passes")

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class TraceError(RuntimeError):
    """The model cannot become a graph; the message says where and why."""


@dataclass
class Traced:
    """What trace returns. `root` owns parameters and submodules under their original names; `graph` refers to them."""

    root: nn.Module
    graph: fx.Graph
    leaves: dict[str, str] = field(default_factory=dict)  # submodule kept whole -> reason
    specialized: dict[str, Any] = field(default_factory=dict)  # argument -> the only value the graph is right for


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward."""
    return any(getattr(module, name, None) for name in HOOKS)


def skeleton(model: nn.Module) -> nn.Module:
    """Return a deep copy of the module tree whose parameters and buffers are new objects on the model's storage.

    Ties (a module or parameter reachable by two names) stay ties. Values that cannot be copied are shared.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in memo:
                continue
            if isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):
                raise TraceError(
                    f"parameter {name!r} of {type(module).__name__} has no shape yet (a lazy module): call the model"
                    " once on an input first, then optimize it"
                )
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


class SubmoduleTracer(fx.Tracer):
    """Symbolic tracer that remembers in which submodule tracing failed, and keeps given submodules whole."""

    def __init__(self, leaves: Mapping[str, str], specialized: Mapping[str, Any]) -> None:
        super().__init__()
        # Without this a buffer is read, and written, as the tensor it is while tracing.
        self.proxy_buffer_attributes = True
        self.leaves = leaves
        self.specialized = specialized
        self.failed: str | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            module_qualified_name in self.leaves
            or has_hooks(m)
            or isinstance(m, torch.jit.ScriptModule)
            or super().is_leaf_module(m, module_qualified_name)
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


def trace(model: nn.Module, example_inputs: Sequence[Any] | None = None) -> Traced:
    """Return the graph of model.forward over a skeleton of the model.

    example_inputs  positional arguments of one call; used where symbolic tracing is not enough, and to learn which
                    optional arguments are given.
    Raises          TraceError if neither way makes a graph; ValueError for a model in training mode.
    """
    if model.training:
        raise ValueError(
            f"{type(model).__name__} is in training mode, and optimize() keeps evaluation semantics only: call"
            " model.eval() first"
        )
    specialized = _specialized_arguments(model, example_inputs)
    leaves: dict[str, str] = {}
    while True:
        traced_root = skeleton(model)
        tracer = SubmoduleTracer(leaves, specialized)
        rng = torch.get_rng_state()
        try:
            graph = tracer.trace(traced_root)
        except Exception as error:  # whatever the model's own code raises when it meets a Proxy
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            if tracer.failed is None or tracer.failed in leaves:
                raise TraceError(f"{type(model).__name__}.forward cannot be traced: {reason}") from error
            log.debug("trace: %s stays one module: %s", tracer.failed, reason)
            leaves[tracer.failed] = reason
            continue
        if not torch.equal(rng, torch.get_rng_state()):
            torch.set_rng_state(rng)
            raise TraceError(f"{type(model).__name__}.forward draws random numbers that a graph would freeze")
        root = skeleton(model)
        _move_constants(graph, traced_root, root)
        return Traced(root, graph, leaves, specialized)


def _specialized_arguments(model: nn.Module, example_inputs: Sequence[Any] | None) -> dict[str, Any]:
    """Optional arguments that forward is likely to branch on, with the default that the graph is made for."""
    given = len(example_inputs) if example_inputs is not None else 0
    parameters = inspect.signature(model.forward).parameters.values()
    return {
        p.name: p.default
        for i, p in enumerate(parameters)
        if i >= given and (p.default is None or isinstance(p.default, bool | str))
    }


def _move_constants(graph: fx.Graph, source: nn.Module, root: nn.Module) -> None:
    """Give root the tensors that forward created while it was traced (the tracer left them on source)."""
    for node in graph.find_nodes(op="get_attr"):
        if "." not in node.target and not hasattr(root, node.target):
            setattr(root, node.target, getattr(source, node.target))
