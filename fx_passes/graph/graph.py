"""Questions about nodes and small edits that every pass shares."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
from torch import fx, nn

from fx_passes import ops


def get_attribute(root: nn.Module, qualified_name: str) -> Any:
    """Return root.a.b.c for "a.b.c"; where root is a NamedParts, its part "a", whatever its class calls so."""
    if not isinstance(root, NamedParts):
        return operator.attrgetter(qualified_name)(root)
    first, _, rest = qualified_name.partition(".")
    part = root.part(first)
    return operator.attrgetter(rest)(part) if rest else part


class NamedParts(fx.GraphModule):
    """A graph module whose parts may have names that its class uses for something else."""

    def part(self, name: str) -> Any:
        """What a graph means by a name without dots. Raises AttributeError."""
        return getattr(self, name)

    def has_clashing_names(self) -> bool:
        """Whether the graph names a part that is no attribute of this module."""
        return False


def lint(graph: fx.Graph, root: nn.Module) -> None:
    """As graph.lint(), which would look for parts of root among its attributes."""
    if not (isinstance(root, NamedParts) and root.graph is graph and root.has_clashing_names()):
        graph.lint()


signature_of = functools.lru_cache(maxsize=1024)(inspect.signature)
"""The signature of a function that lasts; of methods, that of the class's function."""

IN_WORK = "_is_in_work"  # among a module's attributes while passes follow each other
RANK = "rank"  # in the meta of a node: how many dimensions it has
DTYPE = "dtype"  # in the meta of a node: the dtype of the tensor that it is
CREATED = "created"  # in the meta of get_attr nodes: a tensor that forward makes anew, traced as a constant


def is_call(node: Any, *targets: Callable[..., Any]) -> TypeGuard[fx.Node]:
    """Whether node is a call of one of these functions."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def is_vocabulary(node: Any) -> bool:
    """Whether node is in the one spelling of an operation that the passes know."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in ops.VOCABULARY


def is_constant(node: Any) -> bool:
    """Whether the value of node can be computed once: parameters, and functions of nothing else.

    Numbers, None and such are constant too. A get_attr is constant if normalize found nobody who writes to it;
    functions are the vocabulary's, and those that normalize marked.
    """
    if not isinstance(node, fx.Node):
        return not isinstance(node, list | tuple | dict | slice) or not nodes_in(node)
    seen, pending = set(), [node]  # not recursive: a deep network is deeper than Python's stack
    while pending:
        if (node := pending.pop()) in seen:
            continue
        seen.add(node)
        if node.op == "get_attr":
            if not node.meta.get("constant"):
                return False
        elif (is_vocabulary(node) or node.meta.get("constant")) and node.all_input_nodes:
            pending += node.all_input_nodes
        else:
            return False
    return True


def constant_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a graph in order for which is_constant holds, found in one walk."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            known = node.meta.get("constant", False)
        else:
            known = is_vocabulary(node) or node.meta.get("constant")
            known = known and bool(node.all_input_nodes) and found.issuperset(node.all_input_nodes)
        if known:
            found.add(node)
    return found


NO_END = 1 << 62  # where exported slices without an end are made to end, at the least

# x += y and the like, and the operators that write nowhere. The former write to a tensor, which is their result, and
# give another number. Tensors have no x @= y.
AUGMENTED: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
     operator.itruediv: operator.truediv, operator.ifloordiv: operator.floordiv, operator.imod: operator.mod,
     operator.ipow: operator.pow, operator.iand: operator.and_, operator.ior: operator.or_,
     operator.ixor: operator.xor, operator.ilshift: operator.lshift, operator.irshift: operator.rshift}
)  # fmt: skip

# Python's arithmetic on sizes.
ARITHMETIC: frozenset[Callable[..., Any]] = frozenset(
    {*AUGMENTED, *AUGMENTED.values(), operator.neg, operator.getitem, operator.eq, operator.ne, operator.lt,
     operator.le, operator.gt, operator.ge, math.ceil, math.floor, int, max, min, torch.sym_max, torch.sym_min}
)  # fmt: skip


def is_shape(node: Any) -> bool:
    """Whether node is a number (or tuple of them) that follows from the shapes of tensors alone."""
    if not isinstance(node, fx.Node):
        return False
    waiting, seen = [node], {node}  # not recursive: sums may be deeper than Python's stack
    while waiting:
        found = waiting.pop()
        if found.op != "call_function":
            return False
        if found.target in ops.SHAPE:
            continue
        if found.target not in ARITHMETIC or not found.all_input_nodes:
            return False
        waiting += (source for source in found.all_input_nodes if source not in seen)
        seen.update(found.all_input_nodes)
    return True


def nodes_in(argument: Any) -> list[fx.Node]:
    """The nodes inside a nested argument."""
    found: list[fx.Node] = []
    fx.node.map_arg(argument, found.append)
    return found


def reads(node: fx.Node, source: fx.Node) -> int:
    """How often node reads source: 2 in add(x, x), where source.users counts 1."""
    return nodes_in((node.args, node.kwargs)).count(source)


def only_user(node: fx.Node) -> fx.Node | None:
    """Return the node that reads this one, once, if nobody else does; else None."""
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    return user if reads(user, node) == 1 else None


def only_values_count(node: fx.Node) -> bool:
    """Whether nobody outside reads node, or what only moves its data: by itself no such reader sees its strides.

    Results of computations may lie as node does: fx_passes.graph.strides follows these, too.
    """
    return all(
        user.op == "call_function"
        and (
            user.target in ops.COMPUTE | ops.SHAPE
            or (user.target in ops.MOVEMENT | {operator.getitem} and only_values_count(user))
        )
        for user in node.users
    )


def replace(node: fx.Node, value: Any) -> None:
    """Let every reader of node read value instead, and erase node."""
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def erase_unread(node: fx.Node) -> None:
    """Erase a node that nobody reads, and what only it read: for parts of a pattern, which do nothing else."""
    if node.users or node.op == "placeholder":
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        erase_unread(source)


def example(node: Any) -> torch.Tensor | None:
    """The example of the tensor that node computes; None where there is none, or node is none."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def known_shape(node: Any) -> tuple[Any, ...]:
    """The shape of a node's example; () where there is none."""
    value = example(node)
    return () if value is None else tuple(value.shape)


def set_example(node: fx.Node, value: Any) -> None:
    """Let `value` be the example of what node computes (meta["val"]); None: there is none."""
    if value is None:
        for told in ("val",) if node.op == "get_attr" else ("val", RANK, DTYPE):
            node.meta.pop(told, None)
    else:
        node.meta["val"] = value


def read_instead(readers: Iterable[fx.Node], node: fx.Node, found: Any) -> None:
    """Let readers of a node read something else in its place: a number, a node, or several."""
    for reader in readers:
        reader.args, reader.kwargs = fx.node.map_arg(
            (reader.args, reader.kwargs), lambda each: found if each is node else each
        )


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call, given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def remove_dead(graph: fx.Graph) -> bool:
    """Erase nodes nobody reads, if they are known to do nothing else. Return whether any was.

    torch.fx's own dead code elimination would also erase x.add_(1) when only x is read afterwards.
    """
    changed = False
    for node in reversed(graph.nodes):
        pure = is_vocabulary(node) and node.target not in ops.WRITING
        known = node.op == "get_attr" or pure or is_call(node, getattr, *(ARITHMETIC - AUGMENTED.keys()))
        known = known or bool(node.meta.get("constant")) or (is_call(node, *AUGMENTED) and is_shape(node))
        known = known or is_stack(node)
        if (known or is_pure(node) or is_unbind(node)) and not node.users:
            graph.erase_node(node)
            changed = True
    return changed


def is_stack(node: Any) -> bool:
    """Whether node puts tensors side by side along a new dimension, in memory of their own: not in that of out."""
    return is_call(node, torch.stack, torch.ops.aten.stack.default) and node.kwargs.get("out") is None


def is_unbind(node: Any) -> bool:
    """Whether node takes a tensor apart along a dimension."""
    if isinstance(node, fx.Node) and node.op == "call_method":
        return node.target == "unbind"
    return is_call(node, torch.unbind, torch.ops.aten.unbind.int)


def is_pure(node: fx.Node) -> bool:
    """Whether node is an operator that returns something, writes to nothing and draws no random numbers.

    Of aten, or one that quantizes: the weights of other integers than ours are dequantized once.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.namespace not in ("aten", "quantized_decomposed") and not is_affine(node.target):
        return False
    schema = node.target._schema
    random = torch.Tag.nondeterministic_seeded in node.target.tags
    return bool(schema.returns) and not schema.is_mutable and not random


def is_affine(target: Any) -> bool:
    """Whether target is one of torchao's operators that quantize by blocks."""
    return getattr(target, "namespace", "") == "torchao" and target._opname.endswith("_affine")


def sort(graph: fx.Graph, before: Mapping[fx.Node, Iterable[fx.Node]] = MappingProxyType({})) -> None:
    """Restore an order in which every node follows its inputs, moving only nodes that others need earlier.

    before  node -> further nodes that it has to follow
    Raises  AssertionError for a graph that goes in a circle.
    """
    placed: set[fx.Node] = set()
    opened: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node not in before and placed.issuperset(node.all_input_nodes):  # as nearly all are
            placed.add(node)
            continue
        pending = [node]
        while pending:
            top = pending[-1]
            missing = [source for source in (*top.all_input_nodes, *before.get(top, ())) if source not in placed]
            if missing and top not in placed:
                assert top not in opened, f"{top} needs its own result"
                opened.add(top)
                pending.extend(reversed(missing))
                continue
            pending.pop()
            if top not in placed:
                placed.add(top)
                if top is not node:
                    node.prepend(top)


def finish(gm: fx.GraphModule) -> fx.GraphModule:
    """End of a pass: in order, dead code out, checked, compiled. Between passes, the latter two wait for the last."""
    sort(gm.graph)
    remove_dead(gm.graph)
    if not gm.__dict__.get(IN_WORK):
        lint(gm.graph, gm)
    gm.recompile()
    return gm


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy of graph with nodes of its own, which read and return what graph does in the same structures."""
    copied = fx.Graph(tracer_cls=graph._tracer_cls)
    result = copied.graph_copy(graph, {})
    copied.output(result)
    copied.set_codegen(graph._codegen)
    return copied


def tensor_of(gm: nn.Module, node: Any) -> torch.Tensor | None:
    """Return the tensor a get_attr node stands for, else None."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = get_attribute(gm, node.target)
    return value if isinstance(value, torch.Tensor) else None


def unique_name(gm: nn.Module, prefix: str) -> str:
    """The first of prefix_0, prefix_1, ... that gm does not have."""
    i = 0
    while hasattr(gm, f"{prefix}_{i}"):
        i += 1
    return f"{prefix}_{i}"
