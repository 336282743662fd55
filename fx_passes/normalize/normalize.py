"""Spell every operation the vocabulary has in one way: modules, functions, methods, operators, in-place and aten forms.

    Before: layer1_0_conv1 = self.layer1.0.conv1(x)        call_module
            add_ = relu.add_(y)                            call_method
    After:  layer1_0_conv1 = ops.convolution(x, layer1_0_conv1_weight, None, stride=(1, 1), ...)
            add_ = ops.binary(relu, y, "add")

A node keeps its name; node.meta["source"] says what it was. What has no exact equal stays as it is.
Leaves: get_attr nodes marked meta["constant"] where nothing in the graph writes to the tensor.
"""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from fx_passes import ops
from fx_passes.graph import finish, get_attribute, is_call, is_vocabulary
from fx_passes.normalize import builders as b
from fx_passes.normalize.aliasing import Aliasing
from fx_passes.normalize.modules import MODULES, refusal
from fx_passes.normalize.spellings import FUNCTIONS, INPLACE, METHODS, QUALIFIED

log = logging.getLogger("zendnn_cffi.passes")

# Python operators that also work on sizes and lists: a tensor among the operands decides.
_OPERATORS = {operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg, operator.matmul}


def normalize(gm: fx.GraphModule) -> fx.GraphModule:
    """Rewrite gm's graph in the vocabulary; running it again changes nothing."""
    Normalizer(gm).run()
    return finish(gm)


class Normalizer:
    """One walk over the graph, in order."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.parameters: dict[str, fx.Node] = {}
        self.aliasing = Aliasing(gm)

    def run(self) -> None:
        self.aliasing.make_out_of_place()
        for node in list(self.graph.nodes):
            if node.op == "get_attr":
                self.get_attr(node)
            elif not is_vocabulary(node):
                self.visit(node)

    def get_attr(self, node: fx.Node) -> None:
        """One node per parameter, marked constant if it is."""
        first = self.parameters.setdefault(node.target, node)
        if first is node:
            node.meta["constant"] = self.aliasing.is_constant(node.target)
        else:
            node.replace_all_uses_with(first)
            self.graph.erase_node(node)

    def visit(self, node: fx.Node) -> None:
        """Rewrite one node, if a builder knows it."""
        if node in self.aliasing.mutating:
            return
        built = self.build(node)
        if built is None:
            return
        if isinstance(built, b.Alias):
            node.replace_all_uses_with(built.value)
            self.graph.erase_node(node)
            return
        if built.op in ops.MOVEMENT and self.aliasing.is_mutated(node):
            return  # someone writes through this view
        node.meta.setdefault("source", self.describe(node))
        node.op, node.target = "call_function", built.op
        node.args, node.kwargs = built.args, built.kwargs

    def build(self, node: fx.Node) -> b.Built:
        """What the node becomes, or None."""
        if node.op == "call_module":
            return self.build_module(node)
        if node.op == "call_method":
            builder: Callable[..., b.Built] | None = METHODS.get(node.target)
        elif node.op == "call_function":
            if is_call(node, getattr):
                return self.build_shape(node)
            if node.target in _OPERATORS and not any(map(self.is_tensor, node.all_input_nodes)):
                return None
            builder = FUNCTIONS.get(node.target) or QUALIFIED.get(qualified_name(node.target))
        else:
            return None
        return bind(builder, node.args, node.kwargs) if builder else None

    def build_module(self, node: fx.Node) -> b.Built:
        """A module of exactly a known type, called as usual."""
        module = self.gm.get_submodule(node.target)
        row = MODULES.get(type(module))
        if row is None or not node.args and not node.kwargs:
            return None
        reason = refusal(module)
        if reason is not None:
            node.meta["refused"] = reason
            log.debug("normalize: %s stays a %s: %s", node.target, type(module).__name__, reason)
            return None
        args = node.args or tuple(node.kwargs.values())[:1]
        return row(module, lambda name: self.parameter(node, module, name), args)

    def parameter(self, node: fx.Node, module: nn.Module, name: str) -> fx.Node | None:
        """The get_attr node of one of the module's parameters or buffers, in front of its first reader."""
        if getattr(module, name) is None:
            return None
        target = f"{node.target}.{name}"
        if target not in self.parameters:
            with self.graph.inserting_before(node):
                self.parameters[target] = self.graph.get_attr(target)
            self.parameters[target].meta["constant"] = self.aliasing.is_constant(target)
        return self.parameters[target]

    def build_shape(self, node: fx.Node) -> b.Built:
        """x.shape"""
        source, name = node.args[:2]
        return b.size(source) if name == "shape" and self.is_tensor(source) else None

    def is_tensor(self, node: Any) -> bool:
        """Whether node is a tensor for certain, whatever the inputs."""
        if not isinstance(node, fx.Node):
            return False
        if node.op == "get_attr":
            return True
        if is_call(node, operator.getitem):
            return is_call(node.args[0], ops.chunk, ops.split)
        if is_call(node, ops.binary):
            return any(map(self.is_tensor, node.args))
        return is_vocabulary(node) and node.target not in (ops.size, ops.chunk, ops.split)

    def describe(self, node: fx.Node) -> str:
        """The original spelling, for people."""
        if node.op == "call_module":
            return f"{type(get_attribute(self.gm, node.target)).__name__} {node.target}"
        return f"Tensor.{node.target}" if node.op == "call_method" else qualified_name(node.target)


def bind(builder: Callable[..., b.Built], args: tuple[Any, ...], kwargs: dict[str, Any]) -> b.Built:
    """Call a builder as the original was called; None if it was called in a way the builder does not know."""
    try:
        bound = inspect.signature(builder).bind(*args, **kwargs)
    except TypeError:
        return None
    return builder(*bound.args, **bound.kwargs)


def qualified_name(target: Any) -> str:
    """module.name of a function."""
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"
