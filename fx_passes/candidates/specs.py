"""Shapes, dtypes and strides of every node of a region, for one input signature."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from fx_passes import ops
from fx_passes.candidates.layouts import is_describable
from fx_passes.graph.free_sizes import growing_inputs


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before it exists: shape, dtype, and the strides (elements) eager would give it.

    grows  whether another call with the same signature may have another shape, which nothing may depend on
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    grows: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()))

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


class RegionValues:
    """What each node of a region's graph stands for under one signature, found by running plain-torch bodies on fakes.

    specs      node -> TensorSpec, for nodes that compute a tensor at run time
    constants  node -> real tensor, for nodes that depend on parameters alone
    numbers    node -> anything else known now: sizes, tuples of specs, None
    bases      fused node -> TensorSpec of its result before any post-op
    """

    def __init__(self, graph: fx.Graph, inputs: Sequence[TensorSpec], parameters: Mapping[str, torch.Tensor]) -> None:
        self.specs: dict[fx.Node, TensorSpec] = {}
        self.numbers: dict[fx.Node, Any] = {}
        self.bases: dict[fx.Node, TensorSpec] = {}
        self.constants = evaluate_constants(graph, parameters)
        self._mode = FakeTensorMode()
        self._fakes: dict[fx.Node, Any] = {}
        placeholders = iter(inputs)
        for node in graph.nodes:
            if node.op == "placeholder":
                spec = next(placeholders)
                with self._mode:
                    self._record(node, torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="cpu"))
            elif node.op in ("call_function", "get_attr"):
                self.infer(node)
        for node in (*growing_inputs(graph), *graph.find_nodes(op="call_function", target=ops.grow)):
            self.specs[node] = replace(self.specs[node], grows=True)

    def infer(self, node: fx.Node) -> None:
        """Find out what a call_function or get_attr node stands for; its inputs must be known. Nothing is computed."""
        if node in self.constants:
            value = self.constants[node]
            self._fakes[node] = self._mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            return
        with self._mode, torch.no_grad():
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._fakes.__getitem__)
            if kwargs.get("post_ops"):
                base = node.target(*args, **{**kwargs, "post_ops": ()})
                self.bases[node] = TensorSpec.of(base)
                self._record(node, ops.apply_post_ops(base, kwargs["post_ops"]))
            else:
                self._record(node, node.target(*args, **kwargs))

    def _record(self, node: fx.Node, result: Any) -> None:
        if isinstance(result, torch.Tensor) and node.op != "placeholder" and _needs_copy(result):
            # a value has memory of its own, for every element
            result = torch.empty(result.shape, dtype=result.dtype, device=result.device)
        self._fakes[node] = result
        if isinstance(result, torch.Tensor):
            self.specs[node] = TensorSpec.of(result)
        else:
            self.numbers[node] = result

    def base(self, node: fx.Node) -> TensorSpec:
        """The spec of a node's result before its post-ops."""
        return self.bases.get(node, self.specs[node])

    def concrete(self, argument: Any) -> Any:
        """`argument` with every node that stands for a number or a constant replaced by what it stands for."""

        def replace(node: fx.Node) -> Any:
            if node in self.constants:
                return self.constants[node]
            return self.numbers.get(node, node)

        return fx.map_arg(argument, replace)

    def operands(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The run-time tensors that node reads; a tuple of tensors (chunk, split) counts as what it came from."""
        found: dict[fx.Node, None] = {}
        for source in node.all_input_nodes:
            if source in self.specs:
                found[source] = None
            elif source in self.numbers and _has_tensor(self.numbers[source]):
                found.update(dict.fromkeys(self.operands(source)))
        return tuple(found)

    def compute(self, node: fx.Node, given: Mapping[fx.Node, torch.Tensor]) -> Any:
        """Run node's plain-torch body on real tensors for its operands."""

        def value(source: fx.Node) -> Any:
            if source in given:
                return given[source]
            if source in self.constants:
                return self.constants[source]
            number = self.numbers.get(source)
            return self.compute(source, given) if _has_tensor(number) else number

        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        return node.target(*args, **kwargs)

    def constants_of(self, node: fx.Node) -> dict[fx.Node, torch.Tensor]:
        """The constant tensors that node reads, also by way of a tuple of tensors."""
        found: dict[fx.Node, torch.Tensor] = {}
        for source in node.all_input_nodes:
            if isinstance(value := self.constants.get(source), torch.Tensor):
                found[source] = value
            elif source in self.numbers and _has_tensor(self.numbers[source]):
                found.update(self.constants_of(source))
        return found

    def with_constants(self, constants: Mapping[fx.Node, torch.Tensor]) -> RegionValues:
        """The same with other numbers in some constants, of equal shapes and dtypes."""
        other = copy.copy(self)
        other.constants = {**self.constants, **constants}
        return other

    def computation(self, node: fx.Node, operands: Sequence[fx.Node]) -> Callable[..., Any]:
        """Return node's plain-torch body as a function of tensors for its operands; it holds no other constants."""
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
                    if _has_tensor(part.numbers[source]):  # a tuple of tensors, computed again from what it came from
                        waiting.append(source)

        def function(*tensors: torch.Tensor) -> Any:
            return part.compute(node, dict(zip(operands, tensors, strict=True)))

        return function

    def arguments(self, node: fx.Node) -> dict[str, Any]:
        """The node's arguments by parameter name, defaults filled in, numbers and constants as what they stand for."""
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        return {name: self.concrete(value) for name, value in bound.arguments.items()}


def _needs_copy(tensor: torch.Tensor) -> bool:
    return overlaps_itself(tensor) or not is_describable(tuple(tensor.shape), tuple(tensor.stride()))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory (expanded dimensions): nothing can be written there."""
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _has_tensor(value: Any) -> bool:
    """Whether a value is, or holds, a (fake) tensor."""
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))


def evaluate_constants(graph: fx.Graph, parameters: Mapping[str, torch.Tensor]) -> dict[fx.Node, Any]:
    """Return the value of every node that depends on parameters alone (get_attr nodes and folds over them)."""
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "get_attr":
                values[node] = _resolved(parameters[node.target].detach())
            elif node.op == "call_function" and node.all_input_nodes and all(n in values for n in node.all_input_nodes):
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = _resolved(node.target(*args, **kwargs))
    return values


def _resolved(value: Any) -> Any:
    """A tensor whose memory holds its values: not one that is negated, or conjugated, when it is read."""
    if not isinstance(value, torch.Tensor) or not (value.is_neg() or value.is_conj()):
        return value
    return value.resolve_conj().resolve_neg()
