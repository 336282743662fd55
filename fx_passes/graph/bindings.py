"""A graph's calls as PyTorch's own bindings, which is how eager calls them.

    torch.ops.aten.select.int(x, 1, 0)  ->  x[:, 0]               5.4 us -> 1.6 (Zen 3, small tensors)
    narrow(x, 1, 0, 4)                  ->  x[:, 0:4]
    binary(x, 2, "mul")                 ->  x * 2

It is the code of the outer graph that is written so, where such calls are what a call of a small model takes; the graph
keeps its operations, which passes, reports and files know.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx

from fx_passes import ops
from fx_passes.graph.graph import copy_graph, is_call
from fx_passes.graph.structure_code import with_structure_code


class Written(NamedTuple):
    """What a node is to be: op, target and arguments of an fx.Node."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


aten = torch.ops.aten
# Overloads that a method of the same name reaches with the same arguments.
METHODS: frozenset[Any] = frozenset((
    aten.clone.default, aten.copy_.default, aten.repeat.default, aten.gather.default,
    aten.scatter.value, aten.scatter.src, aten.scatter_add.default, aten.index_select.default, aten.cumsum.default,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.bitwise_not.default, aten.logical_not.default,
    aten.eq.Scalar, aten.eq.Tensor, aten.ne.Scalar, aten.ne.Tensor, aten.lt.Scalar, aten.lt.Tensor, aten.le.Scalar,
    aten.le.Tensor, aten.gt.Scalar, aten.gt.Tensor, aten.ge.Scalar, aten.ge.Tensor, aten.argmax.default,
    aten.roll.default, aten.flip.default, aten.triu.default, aten.tril.default, aten.any.dim, aten.all.dim,
    aten.any.default, aten.all.default, aten.diagonal.default, aten.fill_.Scalar, aten.zero_.default,
    aten.histc.default, aten.floor_divide.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
))  # fmt: skip
# Functions that reach an overload with the same arguments.
FUNCTIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType({
    aten.where.self: torch.where, aten.stack.default: torch.stack, aten._conj.default: torch._conj,
    aten.view_as_complex.default: torch.view_as_complex, aten.view_as_real.default: torch.view_as_real,
    aten.zeros_like.default: torch.zeros_like, aten.ones_like.default: torch.ones_like,
    aten.full_like.default: torch.full_like, aten.empty_like.default: torch.empty_like,
    aten.fft_rfft.default: torch.fft.rfft, aten.fft_irfft.default: torch.fft.irfft,
    aten._grouped_mm.default: torch._grouped_mm,
})  # fmt: skip
# These return named tuples, which is another type where it is handed out as a whole.
TUPLES: frozenset[Any] = frozenset((aten.topk.default, aten.sort.default))
# Operations of the vocabulary whose arguments a method takes.
OWN_METHODS: Mapping[Any, str] = MappingProxyType({
    ops.reshape: "reshape", ops.permute: "permute", ops.transpose: "transpose", ops.unsqueeze: "unsqueeze",
    ops.expand: "expand", ops.flatten: "flatten", ops.unflatten: "unflatten", ops.contiguous: "contiguous",
})  # fmt: skip
# Element-wise operations without parameters.
UNARY: Mapping[str, Callable[..., Any]] = MappingProxyType({
    "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "tanh": torch.tanh,
    "logistic": torch.sigmoid, "sin": torch.sin, "cos": torch.cos, "abs": torch.abs, "erf": torch.erf,
})  # fmt: skip


@contextmanager
def code_by_bindings(gm: fx.GraphModule) -> Iterator[None]:
    """Within this, gm.recompile() writes code of a graph whose calls are PyTorch's; gm.graph is as it was."""
    own = gm._graph
    called = by_bindings(own)
    called = copy_graph(own) if called is own else called
    with_structure_code(called)
    object.__setattr__(gm, "_graph", called)
    try:
        yield
    finally:
        object.__setattr__(gm, "_graph", own)


def by_bindings(graph: fx.Graph) -> fx.Graph:
    """A copy of graph in which every call that PyTorch has a binding for is a call of that; graph where none is."""
    if not any(written(node) for node in graph.nodes):
        return graph
    copied = copy_graph(graph)
    for node in copied.nodes:
        if (call := written(node)) is not None:
            node.op, node.target, node.args, node.kwargs = call
    for node in reversed(copied.nodes):
        _join_items(copied, node)
    return copied


def written(node: fx.Node) -> Written | None:
    """A call that computes the same, and takes less time to be made; None where there is none."""
    if node.op != "call_function":
        return None
    target, args, kwargs = node.target, node.args, dict(node.kwargs)
    if isinstance(target, torch._ops.OpOverload):
        return _of_overload(node, target, args, kwargs)
    if kwargs:
        return None
    if target in OWN_METHODS:
        return Written("call_method", OWN_METHODS[target], args, {})
    if target is ops.binary:
        a, b, kind = args
        is_direct = not (isinstance(a, fx.Node) and isinstance(b, fx.Node)) or _have_one_shape(a, b)
        return Written("call_function", ops.BINARY[kind], (a, b), {}) if is_direct else None
    if target is ops.reduce:
        src, kind, dims, keepdim = args
        return Written("call_function", ops.REDUCTIONS[kind], (src, dims, keepdim), {})
    if target is ops.eltwise and args[1] in UNARY and not any(args[2:]):
        return Written("call_function", UNARY[args[1]], args[:1], {})
    if target is ops.index:
        return Written("call_function", operator.getitem, args, {})
    if target is ops.narrow:
        return _as_item(*args)
    return None


def _of_overload(node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Written | None:
    if target is aten.slice.Tensor and not kwargs and len(args) < 5:
        return _as_item(*args)
    if target is aten.select.int and type(args[1]) is int and args[1] >= 0 and not kwargs:
        src, dim, index = args
        return Written("call_function", operator.getitem, (src, (*[slice(None)] * dim, index)), {})
    if target is aten.to.dtype and len(args) == 2 and not kwargs:
        return Written("call_method", "to", args, {})
    if target is aten.index.Tensor and all(map(_has_rows, args[1])):
        return Written("call_function", operator.getitem, (args[0], tuple(args[1])), {})
    if kwargs.get("pin_memory", True) in (False, None):
        del kwargs["pin_memory"]
    if target in FUNCTIONS:
        return Written("call_function", FUNCTIONS[target], args, kwargs)
    is_read_in_pieces = target in TUPLES and all(is_call(user, operator.getitem) for user in node.users)
    if (target in METHODS or is_read_in_pieces) and isinstance(args[0], fx.Node):
        return Written("call_method", target._schema.name.partition("::")[2], args, kwargs)
    return None


def _as_item(src: Any, dim: Any = 0, start: Any = None, stop: Any = None) -> Written | None:
    """src[:, start:stop], where dim is a number."""
    if type(dim) is not int:
        return None
    part, whole = slice(start, stop), slice(None)
    item = (*[whole] * dim, part) if dim >= 0 else (Ellipsis, part, *[whole] * (-1 - dim))
    return Written("call_function", operator.getitem, (src, item), {})


def _join_items(graph: fx.Graph, node: fx.Node) -> None:
    """Let node, an item of an item that nobody else reads, be an item of that one's source; a copy to it sets an item.

    x[:, 1][2:, :, :3]  ->  x[2:, 1, :, :3]          x[:, 1].copy_(y)  ->  x[:, 1] = y
    """
    inner = node.args[0] if node.args else None
    if not isinstance(inner, fx.Node) or not _is_item(inner) or len(inner.users) > 1:
        return
    if _is_item(node) and (item := _item_of_item(inner.args[1], node.args[1])) is not None:
        node.args = inner.args[0], item
        graph.erase_node(inner)
        _join_items(graph, node)
    elif (
        node.op == "call_method" and node.target == "copy_" and len(node.args) == 2 and not (node.users or node.kwargs)
    ):
        _join_items(graph, inner)
        inner = node.args[0]
        node.op, node.target, node.args = "call_function", operator.setitem, (*inner.args, node.args[1])
        graph.erase_node(inner)


def _is_item(node: fx.Node) -> bool:
    """Whether node is a part of a tensor: numbers and slices of its first dimensions, as _as_item writes it."""
    if not is_call(node, operator.getitem) or type(node.args[1]) is not tuple:
        return False
    return all(type(part) in (int, slice) for part in node.args[1])


def _item_of_item(inner: tuple[Any, ...], outer: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The item that takes both at once; None where a part of a part of one dimension is taken."""
    rest, found = list(outer), []
    for part in inner:
        if not isinstance(part, slice) or not rest:
            found.append(part)
        else:
            further = rest.pop(0)
            if part == slice(None):
                found.append(further)
            elif further == slice(None):
                found.append(part)
            else:
                return None
    return (*found, *rest)


def _has_rows(index: Any) -> bool:
    """Whether an index is known to be a tensor of one dimension or more: one number is a view for Python's brackets."""
    value = index.meta.get("val") if isinstance(index, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _have_one_shape(a: fx.Node, b: fx.Node) -> bool:
    """Whether both are known to be tensors of one shape, of which nothing broadcasts."""
    one, other = a.meta.get("val"), b.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return [*map(str, one.shape)] == [*map(str, other.shape)]  # of symbols, too: comparing these would decide sizes
