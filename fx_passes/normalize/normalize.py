"""Spell every operation the vocabulary has in one way: modules, functions, methods, operators, in-place and aten forms.

    Before: layer1_0_conv1 = self.layer1.0.conv1(x)        call_module
            add_ = relu.add_(y)                            call_method
    After:  layer1_0_conv1 = ops.convolution(x, layer1_0_conv1_weight, None, stride=(1, 1), ...)
            add_ = ops.binary(relu, y, "add")

A node keeps its name; node.meta["source"] says what it was. What has no exact equal stays as it is.
Leaves: get_attr nodes, one per tensor name, marked meta["constant"] where nothing in the graph writes to the tensor.
"""

from __future__ import annotations

import inspect
import logging
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.aliasing.effects import qualified_name
from fx_passes.graph.graph import (
    AUGMENTED,
    RANK,
    argument,
    example,
    finish,
    get_attribute,
    is_call,
    is_constant,
    is_shape,
    is_unbind,
    is_vocabulary,
    nodes_in,
    read_instead,
    replace,
    signature_of,
)
from fx_passes.graph.inference import LAYER, dtype, is_tensor, rank
from fx_passes.graph.inner import is_plain, parts
from fx_passes.normalize.attention import build_attention
from fx_passes.normalize.constants import fold_function, is_folded
from fx_passes.normalize.recurrent import build_recurrent
from fx_passes.spellings import int4_linear, int8_linear, movement
from fx_passes.spellings.recurrent import CELLS, STACKS
from fx_passes.spellings.registry import (
    FIRST_RESULT,
    FUNCTIONS,
    METHODS,
    MODULES,
    QUALIFIED,
    Alias,
    Built,
    Call,
    materialize,
    overload_builder,
    refusal,
)

log = logging.getLogger("zendnn_cffi.passes")

# Python operators that also work on numbers and lists: a tensor among the operands decides.
_OPERATORS = {operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg, operator.matmul,
              }  # fmt: skip
_ATTRIBUTES = {
    "shape": movement.size,
    "ndim": movement.rank,
    "mT": lambda src: Call(ops.transpose, (src, -2, -1)),
    "T": lambda src: Call(ops.transpose, (src, 0, 1)) if rank(src) == 2 else None,
}


def normalize(gm: fx.GraphModule) -> fx.GraphModule:
    """Rewrite gm's graph in the vocabulary; running it again changes nothing."""
    name_overloads(gm.graph)
    changed, fewest = True, (math.inf, math.inf)
    while changed:  # an operation that is out of place, and sizes once spelled, let those that shared memory follow
        normalizer = Normalizer(gm)
        normalizer.run()
        aliasing = normalizer.aliasing
        found = (len(aliasing.writers), sum(map(aliasing.is_written_unspelled, aliasing.order)))
        normalizer.make_out_of_place()
        changed = bool(aliasing.writers) and found < fewest  # what is respelled and writes still, stays
        fewest = min(found, fewest)
    return finish(gm)


def name_overloads(graph: fx.Graph) -> None:
    """Let nodes call the overload of an operator that has one alone: PT2E and tracers leave its name open.

    `aten.slice`, which PyTorch's own Python code calls, has one for tensors.
    """
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverloadPacket):
            overloads = node.target.overloads()
            if len(overloads) == 1:
                node.target = getattr(node.target, overloads[0])
            elif node.target is torch.ops.aten.slice and node.args and isinstance(example(node.args[0]), torch.Tensor):
                node.target = torch.ops.aten.slice.Tensor


class Normalizer:
    """One walk over the graph, in order."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.attributes: dict[str, fx.Node] = {}
        self.aliasing = Aliasing(gm)
        self.varying: set[fx.Node] = set()  # nodes walked over that depend on an input, or on who knows what
        self.wrapped: dict[fx.Node, torch.Tensor] = {}  # tensors of subclasses: what functions do with them is theirs
        self.written = {n.target for n in gm.graph.find_nodes(op="get_attr") if self.aliasing.is_written(n)}

    def run(self) -> None:
        """Respell every node that has an exact equal and does not write."""
        for node in list(self.graph.nodes):
            if node.op in ("placeholder", "call_module") or not self.varying.isdisjoint(node.all_input_nodes):
                self.varying.add(node)
            if node.op == "get_attr":
                self.merge(node)
            elif node.graph is self.graph and not is_vocabulary(node) and node not in self.aliasing.writers:
                self.visit(node)

    def make_out_of_place(self) -> None:
        """Respell in-place nodes where that cannot be told, first ones first."""
        if not self.aliasing.writers:
            return  # run() lets no node write that did not
        aliasing = Aliasing(self.gm)
        for node in aliasing.writers:
            aliasing.out_of_place(node)

    def merge(self, node: fx.Node) -> None:
        """One node per tensor name."""
        first = self.attributes.setdefault(node.target, node)
        if first is node:
            self.mark(node)
        else:
            node.replace_all_uses_with(first)
            self.graph.erase_node(node)

    def mark(self, node: fx.Node) -> None:
        """Note what a get_attr node stands for."""
        value = get_attribute(self.gm, node.target)
        node.meta["constant"] = isinstance(value, torch.Tensor) and node.target not in self.written
        if isinstance(value, torch.Tensor):
            node.meta[RANK] = value.ndim
            if not is_plain(value):
                self.wrapped[node] = value
                self.varying.add(node)
                node.meta["constant"] = False

    def visit(self, node: fx.Node) -> None:
        """Rewrite one node, if a builder knows it."""
        if is_call(node, *AUGMENTED) and is_shape(node):
            node.target = AUGMENTED[node.target]  # generated code of n += 1 would change n for its other readers
            return
        if is_call(node, getattr) and node.args[1] == "dtype" and node.args[0].op == "get_attr":
            value = get_attribute(self.gm, node.args[0].target)
            if isinstance(value, torch.Tensor):
                _read_as(node, value.dtype)
                return
        if (part := self.read_part(node)) is not None:
            node.replace_all_uses_with(part)
            self.graph.erase_node(node)
            return
        built = self.unwrapped(self.build(node))
        if isinstance(built, Alias):
            node.replace_all_uses_with(built.value)
            self.graph.erase_node(node)
        elif isinstance(built, Call) and not (built.op in ops.MOVEMENT and self.aliasing.is_written_unspelled(node)):
            source = self.describe(node)
            node.meta.setdefault("source", source)
            args = materialize(self.graph, built.args, node, source)
            node.op, node.target, node.args, node.kwargs = "call_function", built.op, args, built.kwargs
        elif built is None and node not in self.varying and not self.aliasing.is_written(node):
            fold_function(node)

    def read_part(self, node: fx.Node) -> fx.Node | None:
        """The get_attr node of what node, as torch.export writes it, takes out of a tensor; None for other nodes."""
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "export":
            return None
        if node.target._opname != "access_subclass_inner_tensor" or node.args[0] not in self.wrapped:
            return None
        weight, name = node.args
        known = name in parts(self.wrapped[weight]) and weight.target not in self.written
        return self.part(weight, name) if known else None

    def unwrapped(self, built: Built) -> Built:
        """The same from plain tensors; None where a function does with a tensor of a subclass who knows what."""
        if not self.wrapped or not isinstance(built, Call):
            return built
        if built.op is ops.linear and isinstance(weight := built.args[1], fx.Node) and weight in self.wrapped:
            src, _, bias = built.args
            wrapped = self.wrapped[weight]
            is_read = weight.target not in self.written and dtype(src, self.gm) in (None, wrapped.dtype)
            if is_read and not any(each in self.wrapped for each in nodes_in((src, bias))):
                part, is_known = partial(self.part, weight), dtype(src, self.gm) is not None
                found = int8_linear.linear(src, wrapped, part, bias, is_known)
                return found or int4_linear.linear(src, wrapped, part, bias)
        return None if any(each in self.wrapped for each in nodes_in((built.args, built.kwargs))) else built

    def part(self, weight: fx.Node, name: str) -> fx.Node:
        """The get_attr node of a tensor that a tensor is made of."""
        return self.read(f"{weight.target}.{name}", weight)

    def read(self, target: str, place: fx.Node) -> fx.Node:
        """The get_attr node of a name, in front of place if there is none."""
        if target not in self.attributes:
            with self.graph.inserting_before(place):
                self.attributes[target] = self.graph.create_node("get_attr", target)
            self.mark(self.attributes[target])
        return self.attributes[target]

    def build(self, node: fx.Node) -> Built:
        """What the node becomes, or None."""
        if node.op == "call_module":
            return self.build_module(node)
        builder: Callable[..., Built] | None = None
        if node.target in ("expand_as", torch.ops.aten.expand_as.default):
            return build_expand_as(node)
        if node.op == "call_method":
            builder = METHODS.get(node.target)
        elif is_call(node, getattr):
            builder = _ATTRIBUTES.get(node.args[1])
            return builder(node.args[0]) if builder and len(node.args) == 2 else None
        elif is_call(node, operator.getitem) and is_call(node.args[0], ops.size):
            shape, item = node.args[0], node.args[1]
            return movement.size(shape.args[0], item) if shape.args[1] is None and isinstance(item, int) else None
        elif node.op == "call_function":
            if is_call(node, operator.getitem):
                return None if is_folded(node.args[0]) else self.build_index(node)
            if is_call(node, torch.ops.aten.index.Tensor):
                return self.build_pick(node.args[0], [slice(None) if i is None else i for i in node.args[1]])
            if node.target in _OPERATORS and not any(map(is_tensor, node.all_input_nodes)):
                return None
            if node.target in FIRST_RESULT:
                return self.build_first_result(node)
            builder = (
                FUNCTIONS.get(node.target)
                or overload_builder(node.target)
                or QUALIFIED.get(qualified_name(node.target))
            )
        return bind(builder, node.args, node.kwargs) if builder else None

    def build_first_result(self, node: fx.Node) -> Built:
        """An operator with several results, of which only the first is read: node becomes that."""
        readers = list(node.users)
        if not all(is_call(user, operator.getitem) for user in readers):
            return None
        if any(user.users for user in readers if user.args[1] != 0):
            return None
        built = bind(FIRST_RESULT[node.target], node.args, node.kwargs)
        for user in readers if built is not None else ():
            replace(user, node if user.args[1] == 0 else None)
        return built

    def build_index(self, node: fx.Node) -> Built:
        """x[...]: a view, or a table of constants looked up once. Only arrays take a tuple with a slice in it."""
        source, item = node.args
        if is_unbind(source):
            return build_piece(source, item)
        if is_constant(source) and is_constant(item):
            return Call(ops.index, (source, item))
        if not all(map(is_shape, nodes_in(item))):
            return self.build_pick(source, item) if isinstance(item, tuple) else None
        taken_apart = isinstance(item, tuple) and any(i is Ellipsis or isinstance(i, slice) for i in item)
        return movement.index(source, item) if taken_apart or is_tensor(source) else None

    def build_pick(self, source: Any, item: Sequence[Any]) -> Built:
        """x[:, i, j] with constant tables of indices, after whole dimensions."""
        dim = next((d for d, entry in enumerate(item) if entry != slice(None)), 0)
        indices = tuple(item[dim:])
        if not dim or not all(isinstance(i, fx.Node) and is_constant(i) for i in indices):
            return None
        if any(dtype(i, self.gm) not in (torch.int64, torch.int32) for i in indices):
            return None  # a mask selects another number of elements each time
        return Call(ops.pick, (source, dim, indices))

    def build_module(self, node: fx.Node) -> Built:
        """A module of exactly a known type."""
        module = self.gm.get_submodule(node.target)
        if type(module) is nn.MultiheadAttention:
            return build_attention(node, module, lambda name: self.attribute(node, module, name))
        if type(module) in (*STACKS, *CELLS):
            rest_on = getattr(self.gm, "rest_on", None)
            return build_recurrent(node, module, lambda name: self.attribute(node, module, name), rest_on)
        row = MODULES.get(type(module))
        if row is None:
            return None
        reason = refusal(module)
        if reason is not None:
            node.meta["refused"] = reason
            log.debug("normalize: %s stays a %s: %s", node.target, type(module).__name__, reason)
            return None
        try:
            if "forward" in module.__dict__:  # one of its own
                bound, first = inspect.signature(module.forward).bind(*node.args, **node.kwargs), 0
            else:
                bound, first = signature_of(type(module).forward).bind(module, *node.args, **node.kwargs), 1
        except TypeError:
            return None
        if bound.kwargs:  # given by name behind one that was left out
            bound.apply_defaults()
        args = bound.args[first:]
        node.meta[LAYER] = type(module)
        return row(module, lambda name: self.attribute(node, module, name), args)

    def attribute(self, node: fx.Node, module: nn.Module, name: str) -> fx.Node | None:
        """The get_attr node of one of the module's parameters or buffers, in front of its first reader."""
        if get_attribute(module, name) is None:
            return None
        return self.read(f"{node.target}.{name}", node)

    def describe(self, node: fx.Node) -> str:
        """The original spelling, for people."""
        if node.op == "call_module":
            return f"{type(get_attribute(self.gm, node.target)).__name__} {node.target}"
        return f"Tensor.{node.target}" if node.op == "call_method" else qualified_name(node.target)


def bind(builder: Callable[..., Built], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Built:
    """Call a builder as the original was called; None if it was called in a way the builder does not know."""
    try:
        bound = signature_of(builder).bind(*args, **kwargs)
    except TypeError:
        return None
    return builder(*bound.args, **bound.kwargs)


def _read_as(node: fx.Node, value: Any) -> None:
    """Let a value stand wherever node was read, and take node out."""

    read_instead(list(node.users), node, value)
    node.graph.erase_node(node)


_BROADCASTING = {"add", "sub", "mul", "div", "truediv", "multiply"}
_OF_A_TENSOR = {"quantize_per_tensor", "dequantize_per_tensor"}  # element by element, before or after an expansion
_SAME_SHAPE = ops.having(shape="same")


def build_expand_as(node: fx.Node) -> Built:
    """x * gates.expand_as(x), as squeeze-and-excitation is often written: x * gates, which broadcasts by itself.

    Quantized graphs round the expanded gates: the gates are rounded then.
    """
    if len(node.args) != 2 or node.kwargs or not rank(node.args[0]):
        return None  # a number expanded decides the result's dtype, as it is it does not
    source, like = node.args

    def broadcasts(value: fx.Node, user: fx.Node) -> bool:
        target: Any = user.target
        name = target._opname if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", target)
        if name in _OF_A_TENSOR and user.args[0] is value:
            return all(broadcasts(user, each) for each in user.users)
        others = [each for each in user.args if each is not value]
        return name in _BROADCASTING and len(others) == 1 and _is_shaped_as(others[0], like) and not user.kwargs

    return Alias(source) if all(broadcasts(node, user) for user in node.users) else None


def _is_shaped_as(node: Any, like: fx.Node) -> bool:
    """Whether a value is like, or what operations on each of its elements made of it."""
    while node is not like and is_vocabulary(node) and node.target in _SAME_SHAPE:
        node = node.args[0]
    return node is like


def build_piece(unbind: fx.Node, item: Any) -> Built:
    """One of what unbind gives: x.unbind(1)[0] is x[:, 0], and x.unbind(-1)[0] is x[..., 0]."""
    source, dim = argument(unbind, 0, "input"), argument(unbind, 1, "dim", 0)
    if type(dim) is not int or type(item) is not int or not isinstance(source, fx.Node):
        return None
    place = (*(slice(None),) * dim, item) if dim >= 0 else (Ellipsis, item, *(slice(None),) * (-1 - dim))
    return Call(ops.index, (source, place))
