"""Move permutes behind the element-wise operations that read them, to where post-ops can be absorbed, and cancel pairs.

    Before: linear -> permute(0, 3, 1, 2) -> binary(.., x, "add")         (ConvNeXt's residual)
    After:  linear -> binary(.., permute(x, (0, 2, 3, 1)), "add") -> permute(0, 3, 1, 2)

In a layout with channels last such a permute is a view, and so is the one that x gets; where x is itself a permute of
the other kind, nothing is left of the two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.graph.graph import finish, is_call, is_constant, only_user, replace, set_example
from fx_passes.graph.inference import rank


def fuse_permutes(gm: fx.GraphModule) -> fx.GraphModule:
    """Sink what can sink, in order, so that one permute passes a whole chain; then cancel pairs."""
    for node in gm.graph.nodes:
        if is_call(node, ops.permute):
            while (reader := match_reader(node)) is not None:
                sink(node, reader)
    for node in gm.graph.find_nodes(op="call_function", target=ops.permute):
        cancel(node)
    return finish(gm)


def match_reader(permute: fx.Node) -> fx.Node | None:
    """The only reader of a permuted result, if it is element-wise and its other operand can be permuted back."""
    reader = only_user(permute)
    if not is_call(permute.args[0], *ops.WITH_POST_OPS, ops.eltwise, ops.binary) or only_user(permute.args[0]) is None:
        return None
    if is_constant(permute) or not is_call(reader, ops.eltwise, ops.binary):
        return None
    if is_call(reader, ops.binary):
        other = reader.args[1] if reader.args[0] is permute else reader.args[0]
        if isinstance(other, fx.Node) and rank(other) != len(permute.args[1]):
            return None
    return reader


def sink(permute: fx.Node, reader: fx.Node) -> None:
    """reader works on the unpermuted value; its readers read the permute, which moves behind it."""
    source, order = permute.args
    graph = permute.graph

    def unpermuted(operand: Any) -> Any:
        if operand is permute:
            return source
        if not isinstance(operand, fx.Node):
            return operand
        with graph.inserting_before(reader):
            moved = graph.call_function(ops.permute, (operand, inverse(order)))
        set_example(moved, permuted(operand, inverse(order)))
        return moved

    result = reader.meta.get("val")
    reader.args = tuple(unpermuted(a) if i < 2 or is_call(reader, ops.binary) else a for i, a in enumerate(reader.args))
    reader.append(permute)
    reader.replace_all_uses_with(permute)
    permute.args = (reader, order)
    set_example(permute, result)
    set_example(reader, permuted(permute, inverse(order)))


def permuted(node: fx.Node, order: tuple[int, ...]) -> torch.Tensor | None:
    """The example of node's value with its dimensions in another order; None where node has no example."""
    value = node.meta.get("val")
    return value.permute(order) if isinstance(value, torch.Tensor) else None


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """The order that undoes order."""
    positive = [d % len(order) for d in order]
    return tuple(positive.index(d) for d in range(len(order)))


def cancel(outer: fx.Node) -> None:
    """permute of permute is one permute, or nothing; a result that is a view of another result stays one."""
    inner = outer.args[0]
    if not is_call(inner, ops.permute):
        return
    order = tuple(inner.args[1][d] % len(outer.args[1]) for d in outer.args[1])
    source = inner.args[0]
    is_another_tensor = source.op in ("placeholder", "get_attr") or any(user.op == "output" for user in source.users)
    is_returned = any(user.op == "output" for user in outer.users)
    if order == tuple(range(len(order))) and not (is_returned and is_another_tensor):
        replace(outer, source)
    else:
        outer.args = (source, order)
