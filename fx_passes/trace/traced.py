"""What tracing leaves: a graph over a module tree, and the conditions under which it computes what the model would."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fx_passes.graph.graph import copy_graph
from fx_passes.trace.assumptions import Assumption
from fx_passes.trace.call_kind import Kind
from fx_passes.trace.guards import Call, Guards
from fx_passes.trace.named import Named
from fx_passes.trace.outputs import is_plain
from fx_passes.trace.refusals import CAPTURED, Refusals
from fx_passes.trace.sizes import ALL, FreeSizes
from fx_passes.trace.states import State
from zendnn_cffi.values import dataclass

WHOLE = ""  # the name of the root among the leaves: the model as a whole stays as it is


class Untraceable(Exception):
    """Why there is no graph: path of a submodule (WHOLE: the root) -> reason.

    stateful  paths of modules whose state was changed by tracing them
    is_final  whether it is so whichever way it is traced
    written   (path of a module, name) of tensors that forward would have written to while it was traced
    """

    def __init__(
        self,
        reasons: Mapping[str, str],
        stateful: Sequence[str] = (),
        is_final: bool = False,
        written: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__("; ".join(f"{path or 'the model'}: {reason}" for path, reason in reasons.items()))
        self.reasons = dict(reasons)
        self.stateful = tuple(stateful)
        self.is_final = is_final
        self.written = tuple(written)


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
    states       flags of PyTorch's, and environment variables, that it read while it was traced
    named        globals and the like that its code names
    guards       conditions on the inputs that torch.export found the graph to rest on
    example      the example inputs, where the graph was made from them
    decided_by   the example inputs, where the graph was made by torch.fx, and they answered what forward asked of sizes
    kind         of calls that the example is one of
    sizes        which ones torch.export may leave free
    stateful     submodules whose forward was seen to change more than its result
    written      (path of a module, name) of tensors that forward would have written to while it was traced
    shared       addresses of the memory that root has of the model's that it is a copy of
    restored     whether the graph comes from a file, and cannot be made again
    submodules   path -> a submodule that is a graph, where the model is none
    wants_example  whether more would have been tried, had there been an example: torch.export, or submodules by it
    awaits_call  whether the first call's arguments are to be the example
    dtype        the default dtype while it was traced: of tensors that forward makes, and of results of integers
    """

    root: nn.Module
    graph: fx.Graph | None
    leaves: dict[str, str] = field(default_factory=dict)
    specialized: dict[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    assumed: tuple[Assumption, ...] = ()
    states: tuple[State, ...] = ()
    named: Named | None = None
    guards: Guards | None = None
    example: Call | None = None
    decided_by: Call | None = None
    kind: Kind | None = None
    sizes: FreeSizes = ALL
    stateful: tuple[str, ...] = ()
    written: tuple[tuple[str, str], ...] = ()
    shared: frozenset[int] = frozenset()
    restored: bool = False
    submodules: dict[str, Traced] = field(default_factory=dict)
    wants_example: bool = False
    awaits_call: bool = False
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    @property
    def is_for_all(self) -> bool:
        """Whether the graph is right for whatever call."""
        rests_on = (
            self.guards or self.refusals or self.named or self.specialized or self.given or self.assumed or self.states
        )
        return not rests_on

    @property
    def own_example(self) -> Call | None:
        """The example inputs that the graph rests on; None where it is for all that it was traced for."""
        return self.decided_by if self.example is None else self.example

    @property
    def calls(self) -> str:
        """Which calls the graph is for, for people."""
        if self.kind is not None:
            return self.kind.text
        needed = [name for name, default in self.parameters.items() if default is inspect.Parameter.empty]
        fixed = [f"{name}={value!r}" for name, value in self.specialized.items()]
        return ", ".join([*needed, *sorted(self.given.difference(needed)), *fixed])

    @cached_property
    def refusals(self) -> Refusals | None:
        """Tells calls that the graph would compute, and eager PyTorch refuses, or computes otherwise; None for none."""
        return Refusals.of(self.root, self.graph)

    def serve_all_sizes(self) -> None:
        """Be for calls of all sizes with the answers of the example, as torch.export has no graph for these."""
        if self.decided_by is not None and self.refusals is not None:
            self.refusals.serve_all_sizes()

    def arrange(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, may_ask: bool = False) -> Call | None:
        """The call's arguments as the graph takes them; None where it does not compute what the model would.

        may_ask  whether they may ask for gradients, as the graph is run as plain PyTorch
        """
        if self.states and not all(state.holds() for state in self.states):
            return None
        if self.named is not None and not self.named.unchanged():
            return None
        for position, name, rank in self._ranks:
            value = kwargs[name] if name in kwargs else args[position] if position < len(args) else None
            if not isinstance(value, torch.Tensor) or value.ndim != rank:
                return None
        if (self.specialized or self.given or self._assumed_else) and not self._agrees(args, kwargs):
            return None
        if self.guards is None or self.example is None:
            refusals = self.refusals
            return (args, kwargs) if refusals is None or refusals.allow_call(args, kwargs, self.parameters) else None
        ordered = self._as_in_example(args, kwargs)
        if ordered is None:
            return None
        if not self.guards.hold(*ordered, may_ask=may_ask):
            ordered = self.guards.reordered(*ordered)
            if ordered is None or not self.guards.hold(*ordered, may_ask=may_ask):
                return None
        if self.refusals is not None:
            leaves = pytree.tree_leaves(ordered)
            # torch.export compared sizes with what its operators take, for tensors that lie as the example's
            is_usual = self._is_example_dense and all(map(_is_dense, leaves))
            refusals = self._refusals_of_sizes if is_usual else self.refusals
            if refusals is not None and not refusals.allow_flat(leaves):
                return None
        return ordered

    def sizes_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
        """Sizes that such a call may have, where its own are all that the graph is not right for; () otherwise."""
        if self.guards is None or self.example is None:
            return ()
        ordered = self._as_in_example(args, kwargs)
        return self.guards.known_sizes if ordered is not None and self.guards.resemble(*ordered) else ()

    def is_for_other_sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether sizes alone keep the graph from being right for a call: the model branches on them."""
        if not all(state.holds() for state in self.states) or not (self.named is None or self.named.unchanged()):
            return False
        if self.decided_by is not None:
            return self._agrees(args, kwargs)
        ordered = None if self.guards is None or self.example is None else self._as_in_example(args, kwargs)
        return ordered is not None and self.guards is not None and self.guards.resemble(*ordered)

    @cached_property
    def _refusals_of_sizes(self) -> Refusals | None:
        return Refusals.of(self.root, self.graph, CAPTURED)

    @cached_property
    def _is_example_dense(self) -> bool:
        return all(map(_is_dense, pytree.tree_leaves(self.example)))

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name."""
        return {**dict(zip(self.parameters, args, strict=False)), **kwargs}

    def _agrees(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the arguments are those that the trace took for granted."""
        values = self._named(args, kwargs)
        for name, value in self.specialized.items():
            if not _is_one(values.get(name, self.parameters[name]), value):
                return False
        if not all(values.get(name) is not None for name in self.given):
            return False
        return all(assumption.holds(values) for assumption in self._assumed_else)

    @cached_property
    def _ranks(self) -> tuple[tuple[int, str, int], ...]:
        """Position, name and rank of arguments of which one is assumed: most models are so, and nothing else."""
        names, found = [*self.parameters], []
        for name, path, kind in self.assumed:
            if isinstance(kind, int) and not path and name in names:
                found.append((names.index(name), name, kind))
        return tuple(found)

    @cached_property
    def _assumed_else(self) -> tuple[Assumption, ...]:
        """What is assumed beside these."""
        own = {(name, rank) for _, name, rank in self._ranks}
        return tuple(each for each in self.assumed if each.path or (each.name, each.kind) not in own)

    def _as_in_example(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The same call with the arguments by position that the example had there; None where others are given."""
        assert self.example is not None
        by_position, by_name = self.example
        if len(args) == len(by_position) and kwargs.keys() == by_name.keys():
            return args, {name: kwargs[name] for name in by_name}
        expected = [*list(self.parameters)[: len(by_position)], *by_name]
        values = self._named(args, kwargs)
        if values.keys() != set(expected):
            values = self._with_defaults(values, expected)
        if self._has_var_positional or values.keys() != set(expected) or not self._may_be_called(args, kwargs):
            return None
        n = len(by_position)
        return tuple(values[name] for name in expected[:n]), {name: values[name] for name in expected[n:]}

    def _with_defaults(self, values: dict[str, Any], expected: Sequence[str]) -> dict[str, Any]:
        """Arguments by name, where one that is left out and one that is its default are the same."""
        empty = inspect.Parameter.empty
        defaults = {name: default for name, default in self.parameters.items() if default is not empty}
        left_out = {name: defaults[name] for name in expected if name in defaults and name not in values}
        given = {
            name: value
            for name, value in values.items()
            if name in expected or not _is_one(value, defaults.get(name, empty))
        }
        return given | left_out

    def _may_be_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether no argument is given twice, or by position where it has to be named: forward raises for these."""
        return len(args) <= len(self._by_position) and kwargs.keys().isdisjoint(self._by_position[: len(args)])

    @cached_property
    def _by_position(self) -> tuple[str, ...]:
        parameters = forward_signature(self.root).parameters.values()
        return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))

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
        graph = self.graph and copy_graph(self.graph)
        return replace(self, root=root, graph=graph, submodules=submodules, shared=frozenset())

    def __getstate__(self) -> dict[str, Any]:
        """An exported graph is not picklable; it is made again from the example."""
        state = {key: value for key, value in self.__dict__.items() if "refusals" not in key}
        state["shared"] = frozenset()
        state["named"] = None if self.named is None else self.named.values()
        if self.example is not None and not self.restored:
            state.update(graph=None, guards=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.example is not None and not self.restored:
            from fx_passes.trace.export import export  # what is exported already does without

            self.graph, self.guards = export(self.root, *self.example, self.sizes)
        if (values := state["named"]) is not None:
            self.named = Named.read_again(self.root, values, is_new=self.example is not None and not self.restored)


def _is_one(value: Any, other: Any) -> bool:
    """Whether two values are the same to whoever reads them."""
    return value is other or (type(value) is type(other) and is_plain(other) and bool(value == other))


def _is_dense(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.is_contiguous()
