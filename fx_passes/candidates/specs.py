"""Shapes, dtypes and strides of every node of a region, for one input signature."""

from __future__ import annotations

import copy
import math
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only

from fx_passes import ops
from fx_passes.candidates.folds import bound, is_late
from fx_passes.candidates.layouts import is_describable
from fx_passes.candidates.shapes.elementwise import after_post_ops
from fx_passes.candidates.shapes.rules import infer
from fx_passes.candidates.shapes.spec import TensorSpec, Unclear, row_major
from fx_passes.graph.free_sizes import growing_inputs
from fx_passes.graph.graph import signature_of
from zendnn_cffi.engine.openmp import single_threaded
from zendnn_cffi.primitives.checks import strides_overlap
from zendnn_cffi.runtime.courtesy import give_way

__all__ = ["Constants", "RegionValues", "TensorSpec", "evaluate_constants"]


class Constants(MutableMapping[fx.Node, Any]):
    """The value of every node that depends on parameters alone: get_attr nodes, and folds over them, once asked for."""

    def __init__(self, graph: fx.Graph, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._values: dict[fx.Node, Any] = {}
        self._nodes: dict[fx.Node, None] = {}
        for node in graph.nodes:
            reads = node.all_input_nodes
            if node.op == "get_attr" or (
                node.op == "call_function" and reads and all(source in self._nodes for source in reads)
            ):
                self._nodes[node] = None

    def __getitem__(self, node: fx.Node) -> Any:
        if node not in self._nodes:
            raise KeyError(node)
        if node not in self._values:
            self._evaluate(node, self._values)
        return self._values[node]

    def compute(self, node: fx.Node) -> Any:
        """The value of a node, not kept where it was not."""
        known: MutableMapping[fx.Node, Any] = ChainMap({}, self._values)
        if node not in known:
            self._evaluate(node, known)
        return known[node]

    def _evaluate(self, wanted: fx.Node, values: MutableMapping[fx.Node, Any]) -> None:
        """Not recursive: folds may be deeper than Python's stack."""
        if wanted.op == "get_attr":  # most are: nothing is computed
            values[wanted] = self._parameter(wanted)
            return
        waiting = [wanted]
        with torch.no_grad(), single_threaded():
            while waiting:
                node = waiting[-1]
                if missing := [source for source in node.all_input_nodes if source not in values]:
                    waiting += missing
                    continue
                waiting.pop()
                if node.op == "get_attr":
                    values[node] = self._parameter(node)
                elif node not in values:
                    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                    values[node] = _resolved(node.target(*args, **kwargs))

    def _parameter(self, node: fx.Node) -> torch.Tensor:
        found: torch.Tensor = _resolved(self._parameters[node.target].detach())
        return found

    def __contains__(self, node: object) -> bool:
        return node in self._nodes

    def __setitem__(self, node: fx.Node, value: Any) -> None:
        self._nodes[node] = None
        self._values[node] = value

    def __delitem__(self, node: fx.Node) -> None:
        del self._nodes[node]
        self._values.pop(node, None)

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def clear(self) -> None:
        """Let go of every value."""
        self._nodes.clear()
        self._values.clear()


class RegionValues:
    """What each node of a region's graph stands for under one signature.

    The rules of fx_passes.candidates.shapes tell most; zeros, run through the plain-torch bodies, the rest.

    specs      node -> TensorSpec, for nodes that compute a tensor at run time
    constants  node -> real tensor, for nodes that depend on parameters alone
    numbers    node -> anything else known now: sizes, None; tuples of specs, and specs of tensors that readers compute
    bases      fused node -> TensorSpec of its result before any post-op
    """

    def __init__(self, graph: fx.Graph, inputs: Sequence[TensorSpec], parameters: Mapping[str, torch.Tensor]) -> None:
        self.specs: dict[fx.Node, TensorSpec] = {}
        self.numbers: dict[fx.Node, Any] = {}
        self.bases: dict[fx.Node, TensorSpec] = {}
        self.constants: MutableMapping[fx.Node, Any] = Constants(graph, parameters)
        self._late = True
        self._known: dict[fx.Node, Any] = {}  # as specs and numbers, and specs of constants
        placeholders = iter(inputs)
        for node in graph.nodes:
            if node.op == "placeholder":
                spec = next(placeholders)
                self._record(node, TensorSpec(spec.shape, spec.dtype, spec.strides))
            elif node.op in ("call_function", "get_attr"):
                give_way()
                self.infer(node)
        for node in (*growing_inputs(graph), *graph.find_nodes(op="call_function", target=ops.grow)):
            self.specs[node] = replace(self.specs[node], grows=True)

    def infer(self, node: fx.Node) -> None:
        """Find out what a call_function or get_attr node stands for; its inputs must be known. Nothing is computed."""
        if node in self.constants:
            self._known[node] = self._spec_of_constant(node)
            return
        try:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._clear)
            if post_ops := kwargs.get("post_ops"):
                base = infer(node.target, args, {**kwargs, "post_ops": ()})
                self.bases[node], result = base, after_post_ops(base, post_ops)
            else:
                result = infer(node.target, args, kwargs)
        except Unclear:
            result = tried(node, self)
        self._record(node, result)

    def _clear(self, node: fx.Node) -> Any:
        value = self._known[node]
        if isinstance(value, torch.Tensor):
            raise Unclear
        return value

    def _spec_of_constant(self, node: fx.Node) -> Any:
        """A constant's spec; the constant itself, where it is no tensor with strides."""
        if node.op == "call_function":
            try:
                return infer(node.target, *fx.map_arg((node.args, node.kwargs), self._clear))
            except Unclear:
                pass
        value = self.constants[node]
        return TensorSpec.of(value) if isinstance(value, torch.Tensor) and value.layout is torch.strided else value

    def _record(self, node: fx.Node, result: Any) -> None:
        if isinstance(result, TensorSpec):
            if node.op != "placeholder" and _needs_copy(result):
                # a value has memory of its own, for every element
                result = row_major(result.shape, result.dtype)
            self.specs[node] = result
        else:
            self.numbers[node] = result
        self._known[node] = result

    def known(self, node: fx.Node) -> Any:
        """The spec of a tensor, constants included; what anything else is."""
        return self._known[node]

    def base(self, node: fx.Node) -> TensorSpec:
        """The spec of a node's result before its post-ops."""
        return self.bases.get(node, self.specs[node])

    def concrete(self, argument: Any) -> Any:
        """`argument` with every node that stands for a number or a constant replaced by what it stands for."""

        def replace(node: fx.Node) -> Any:
            if node in self.constants:
                spec = self._known.get(node)
                if isinstance(spec, TensorSpec) and self.is_late(node):
                    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")
                return self.constants[node]
            return self.numbers.get(node, node)

        return fx.map_arg(argument, replace)

    def is_late(self, node: fx.Node) -> bool:
        """Whether a constant is computed when it is packed: until then a meta tensor stands for it."""
        return self._late and is_late(node)

    def late(self, node: fx.Node) -> Callable[[], torch.Tensor] | None:
        """What computes such a constant; None for others."""
        if not self.is_late(node):
            return None
        assert isinstance(self.constants, Constants)
        return partial(self.constants.compute, node)

    def are_constants_finite(self, node: fx.Node) -> bool:
        """Whether the constants that node reads are finite throughout. One pass, and no memory: weights are large."""
        late = [source for source in node.all_input_nodes if source in self.constants and self.is_late(source)]
        return all(map(self._is_fold_finite, late)) and all(map(_is_finite, self.constants_of(node, late).values()))

    def _is_fold_finite(self, node: fx.Node) -> bool:
        """Whether a late fold is: mostly the bound tells, and nothing is computed."""
        assert isinstance(self.constants, Constants)
        weight, *others = fx.map_arg(node.args, self.constants.compute)
        if weight.numel() == 0 or bound(node, weight, tuple(others)) < torch.finfo(weight.dtype).max:
            return True
        return _is_finite(self.constants.compute(node))

    def cover(self, node: fx.Node) -> None:
        """Let whoever reads node compute it: it is no operand, its own operands are."""
        self.numbers[node] = self.specs.pop(node)

    def operands(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The run-time tensors that node reads; a tuple (chunk), or what is covered, counts as what it came from."""
        found: dict[fx.Node, None] = {}
        for source in node.all_input_nodes:
            if source in self.specs:
                found[source] = None
            elif source in self.numbers and _has_tensor(self.numbers[source]):
                found.update(dict.fromkeys(self.operands(source)))
        return tuple(found)

    def compute(self, node: fx.Node, given: Mapping[fx.Node, torch.Tensor]) -> Any:
        """Run node's plain-torch body on real tensors for its operands."""
        args, kwargs = self._real(node, given)
        return node.target(*args, **kwargs)

    def _real(self, node: fx.Node, given: Mapping[fx.Node, torch.Tensor]) -> tuple[Any, Any]:
        """The arguments of node's body on real tensors for its operands."""

        def value(source: fx.Node) -> Any:
            if source in given:
                return given[source]
            if source in self.constants:
                return self.constants[source]
            number = self.numbers.get(source)
            return self.compute(source, given) if _has_tensor(number) else number

        real: tuple[Any, Any] = fx.map_arg((node.args, node.kwargs), value)
        return real

    def constants_of(self, node: fx.Node, without: Collection[fx.Node] = ()) -> dict[fx.Node, torch.Tensor]:
        """The constant tensors that node reads, also by way of a tuple of tensors."""
        found: dict[fx.Node, torch.Tensor] = {}
        for source in node.all_input_nodes:
            if source in without:
                continue
            if isinstance(value := self.constants.get(source), torch.Tensor):
                found[source] = value
            elif source in self.numbers and _has_tensor(self.numbers[source]):
                found.update(self.constants_of(source))
        return found

    def with_constants(self, constants: Mapping[fx.Node, torch.Tensor]) -> RegionValues:
        """The same with other numbers in some constants, of equal shapes and dtypes."""
        other = copy.copy(self)
        other._late = False
        other.constants = ChainMap({**constants}, self.constants)
        return other

    def computation(self, node: fx.Node, operands: Sequence[fx.Node]) -> Callable[..., Any]:
        """Return node's plain-torch body as a function of tensors for its operands; it holds no other constants."""
        part = self._read_by(node, operands)

        def function(*tensors: torch.Tensor) -> Any:
            return part.compute(node, dict(zip(operands, tensors, strict=True)))

        return function

    def given(self, node: fx.Node, operands: Sequence[fx.Node]) -> Callable[..., tuple[Any, Any]]:
        """As computation(), of a function that returns the arguments (args, kwargs) of the body."""
        part = self._read_by(node, operands)
        return lambda *tensors: part._real(node, dict(zip(operands, tensors, strict=True)))

    def _read_by(self, node: fx.Node, operands: Sequence[fx.Node]) -> RegionValues:
        """What node reads beside these operands."""
        part = object.__new__(RegionValues)
        part.constants, part.numbers = {}, {}
        waiting = [node]
        while waiting:
            for source in waiting.pop().all_input_nodes:
                if source in operands or source in part.numbers:
                    continue
                if source in self.constants:
                    part.constants[source] = self.constants[source]
                else:
                    part.numbers[source] = self.numbers.get(source)
                    if _has_tensor(part.numbers[source]):  # a tuple, or covered: computed from what it came from
                        waiting.append(source)
        return part

    def arguments(self, node: fx.Node) -> dict[str, Any]:
        """The node's arguments by parameter name, defaults filled in, numbers and constants as what they stand for."""
        bound = signature_of(node.target).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        return {name: self.concrete(value) for name, value in bound.arguments.items()}


def tried(node: fx.Node, values: RegionValues) -> Any:
    """What a node stands for, found out by its plain-torch body on zeros; the spec before post-ops goes to bases.

    Fake and meta tensors would cost no arithmetic. Their strides are not always eager's: batch_norm's, rms_norm's, or
    those of sums with numbers.
    """

    def given(source: fx.Node) -> Any:
        constant = values.constants.get(source)
        if isinstance(constant, torch.Tensor):
            return constant
        return tree_map_only(TensorSpec, zeros, values.known(source))

    args, kwargs = fx.map_arg((node.args, node.kwargs), given)
    with torch.no_grad():
        if post_ops := kwargs.get("post_ops"):
            base = node.target(*args, **{**kwargs, "post_ops": ()})
            values.bases[node] = TensorSpec.of(base)
            result = ops.apply_post_ops(base, post_ops)
        else:
            result = node.target(*args, **kwargs)
    return tree_map_only(torch.Tensor, TensorSpec.of, result)


def zeros(spec: TensorSpec) -> torch.Tensor:
    """A tensor like that, also where elements share memory."""
    reach = sum((size - 1) * step for size, step in zip(spec.shape, spec.strides, strict=True)) + 1
    memory = torch.zeros(max(reach, 1), dtype=spec.dtype, device="cpu")
    return memory.as_strided(spec.shape, spec.strides)


def _needs_copy(spec: TensorSpec) -> bool:
    return strides_overlap(spec.shape, spec.strides) or not is_describable(spec.shape, spec.strides)


def _has_tensor(value: Any) -> bool:
    """Whether a value is, or holds, the spec of a tensor."""
    return any(isinstance(leaf, TensorSpec | torch.Tensor) for leaf in tree_leaves(value))


def evaluate_constants(graph: fx.Graph, parameters: Mapping[str, torch.Tensor]) -> dict[fx.Node, Any]:
    """Return the value of every node that depends on parameters alone (get_attr nodes and folds over them)."""
    return dict(Constants(graph, parameters))


def _is_finite(constant: torch.Tensor) -> bool:
    """Whether all values are finite."""
    if not constant.is_floating_point() or constant.numel() == 0:
        return True
    return all(map(math.isfinite, map(float, torch.aminmax(constant.detach()))))


def _resolved(value: Any) -> Any:
    """A tensor whose memory holds its values: not one that is negated, or conjugated, when it is read."""
    if not isinstance(value, torch.Tensor) or not (value.is_neg() or value.is_conj()):
        return value
    return value.resolve_conj().resolve_neg()
