"""Linears that read the same input become one wider linear, whose result is looked at in slices.

    Before: q = linear(x, wq, bq); k = linear(x, wk, bk); v = linear(x, wv, bv)
    After:  wide = linear(x, concat(wq, wk, wv), concat(bq, bk, bv)); q = wide[..., :n], ...

Who sees the strides of a result (outside of the graph, or an operation that is not known) gets a copy without gaps.
Only where each result is reshaped or moved next: a result that an element-wise operation reads absorbs that as a
post-op, which is worth more. The wide weight is a constant subgraph: the parameters keep their names. Of layers of
integers, the integers are joined, and their scales.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import finish, get_attribute, is_call, nodes_in, only_values_count, tensor_of
from fx_passes.ops.quantized import plain_axis
from zendnn_cffi.values import dataclass

_MAX_GROUP = 8
PARTS = "parts"  # in meta of the wide layer: names of those that it stands for


def fuse_projections(gm: fx.GraphModule) -> fx.GraphModule:
    """Fuse every group of two and more."""
    for group in find_groups(gm):
        widen(gm, group)
    return finish(gm)


@dataclass(frozen=True)
class Projection:
    """A linear layer of constant weights.

    node     ops.linear; ops.dynamic_linear or ops.row_scaled_linear, where scales stand between source and weight
    weight   the parameter; integers where the layer reads them dequantized
    scales   of dequantized integers, a scale for each output
    """

    node: fx.Node
    weight: fx.Node
    scales: fx.Node | None = None

    @property
    def operands(self) -> tuple[Any, ...]:
        """What stands before the weight."""
        return self.node.args[:-2]

    @property
    def bias(self) -> Any:
        return self.node.args[-1]

    @property
    def parameters(self) -> tuple[fx.Node, ...]:
        return tuple(node for node in (self.weight, self.scales, self.bias) if isinstance(node, fx.Node))

    def key(self, gm: fx.GraphModule) -> tuple[Any, ...]:
        """Equal for layers that may become one."""
        src, *rest = self.operands
        weight = _tensor(gm, self.weight)
        how = self.node.args[-2].args[3:] if self.scales is not None else ()
        return self.node.target, self.node.kwargs.get("dtype"), _value(src), *rest, weight.dtype, weight.shape[1], how


def _value(node: Any) -> Any:
    """Equal for what is equal: each reader may have a node that dequantizes, or quantizes, for it alone."""
    if not is_call(node, ops.dequantize, ops.quantize):
        return node
    return node.target, _value(node.args[0]), *node.args[1:]


def find_groups(gm: fx.GraphModule) -> list[list[Projection]]:
    """Groups of linears with one input and constant weights of one dtype and depth, in graph order."""
    aliasing, groups = Aliasing(gm), dict[tuple[Any, ...], list[list[Projection]]]()
    for target in (ops.linear, ops.dynamic_linear, ops.row_scaled_linear):
        for node in gm.graph.find_nodes(op="call_function", target=target):
            found = match_projection(node, gm)
            if found is None:
                continue
            alike = groups.setdefault(found.key(gm), [])
            if alike and _read_the_same(alike[-1][0], found, aliasing):
                alike[-1].append(found)
            else:
                alike.append([found])
    return [group for alike in groups.values() for group in alike if 2 <= len(group) <= _MAX_GROUP]


def _read_the_same(first: Projection, other: Projection, aliasing: Aliasing) -> bool:
    """Whether nobody writes to what both read, between the first that reads it and the last."""
    values = [*_read_by(first), *_read_by(other)]
    readers = [first.node, *(value for value in values if is_call(value, ops.dequantize, ops.quantize))]
    return not aliasing.is_written_between(values, min(readers), other.node)


def _read_by(layer: Projection) -> list[fx.Node]:
    """The operands of a layer, and what they are dequantized or quantized of."""
    found, pending = list[fx.Node](), nodes_in(layer.operands)
    while pending:
        found.append(value := pending.pop())
        if is_call(value, ops.dequantize, ops.quantize):
            pending += value.all_input_nodes
    return found


def match_projection(node: fx.Node, gm: fx.GraphModule) -> Projection | None:
    """node as a layer that may become part of another; None where it may not."""
    src, weight, bias = node.args[0], node.args[-2], node.args[-1]
    if node.kwargs["post_ops"] or not _is_moved(node) or not isinstance(src, fx.Node):
        return None
    own_bias = None if bias is None else _parameter(gm, bias)
    if bias is not None and own_bias is None:
        return None
    if not is_call(weight, ops.dequantize):
        plain = _parameter(gm, weight)
        return Projection(node, weight) if plain is not None and _is_of(plain, own_bias) else None
    kept, scales, zero_point, axis, _ = weight.args
    integers, zero_points = _parameter(gm, kept), tensor_of(gm, zero_point)
    if integers is None or _parameter(gm, scales) is None or integers.dtype != torch.int8:
        return None
    if plain_axis(axis, tuple(integers.shape)) != 0 or not _is_of(integers, own_bias):
        return None
    if bool(zero_points.any()) if zero_points is not None else zero_point:
        return None
    return Projection(node, kept, scales)


def _is_of(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a bias, if there is any, has a number for each output: PyTorch broadcasts others."""
    return bias is None or bias.shape == weight.shape[:1]


def _parameter(gm: fx.GraphModule, node: Any) -> torch.Tensor | None:
    """The tensor of a get_attr node that nothing writes to."""
    if not isinstance(node, fx.Node) or node.op != "get_attr" or not node.meta.get("constant"):
        return None
    value = get_attribute(gm, node.target)
    return value if isinstance(value, torch.Tensor) and value.ndim in (1, 2) else None


def _tensor(gm: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    value: torch.Tensor = get_attribute(gm, node.target)
    return value


def _is_moved(node: fx.Node) -> bool:
    """Whether only reshapes and such read the result."""
    shapes = ops.SHAPE | ops.MOVEMENT
    return bool(node.users) and all(is_call(user, *shapes) for user in node.users)


def widen(gm: fx.GraphModule, group: list[Projection]) -> None:
    """Put one linear in place of the first of group, and slices of it in place of all."""
    graph, first = gm.graph, group[0].node
    sizes = [_tensor(gm, part.weight).shape[0] for part in group]
    for part in group:  # their parameters may stand further down
        for source in part.parameters:
            first.prepend(source)
    with graph.inserting_before(first):
        weight = _joined(graph, group)
        bias = None
        if any(part.bias is not None for part in group):
            rows = [part.bias or graph.call_function(ops.no_bias, (part.scales or part.weight,)) for part in group]
            bias = graph.call_function(ops.concat, (tuple(rows), 0))
        wide = graph.call_function(first.target, (*group[0].operands, weight, bias), dict(first.kwargs))
        wide.meta["source"] = "; ".join(str(part.node.meta.get("source", part.node.name)) for part in group)
        wide.meta[PARTS] = tuple(part.node.name for part in group)
        start, pieces = 0, []
        for part, size in zip(group, sizes, strict=True):
            piece = graph.call_function(ops.narrow, (wide, -1, start, start + size))
            if not only_values_count(part.node):  # somebody sees its strides: those of a tensor of its own
                piece = graph.call_function(ops.contiguous, (piece,))
            pieces.append(piece)
            start += size
    value = first.meta.get("val")
    if isinstance(value, torch.Tensor):
        wide.meta["val"] = value.new_empty((*value.shape[:-1], start))
    for part, piece in zip(group, pieces, strict=True):
        if "val" in part.node.meta:
            piece.meta["val"] = part.node.meta["val"]
        part.node.replace_all_uses_with(piece)
        graph.erase_node(part.node)


def _joined(graph: fx.Graph, group: list[Projection]) -> fx.Node:
    """The weights below each other, dequantized where they are integers."""
    weight = graph.call_function(ops.concat, (tuple(part.weight for part in group), 0))
    if group[0].scales is None:
        return weight
    scales = graph.call_function(ops.concat, (tuple(part.scales for part in group), 0))
    how = group[0].node.args[-2].args[3:]
    return graph.call_function(ops.dequantize, (weight, scales, None, *how))
