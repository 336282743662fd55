"""Answer questions about shapes where the graph knows the answer, and drop assertions that hold.

    Before: size(relu(x), 0); rank(conv(x)) == 4 -> torch._assert
    After:  size(x, 0)

What is left reads earlier values, so fewer tensors have to leave a region for the sake of their shape. Of inputs with
a free size in common, the one is read that has fewest others: not a cache that is longer in each step.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.aliasing.effects import resizes
from fx_passes.graph.graph import ARITHMETIC, finish, is_call, is_shape, replace
from fx_passes.graph.inference import rank, rank_source

_SAME_SHAPE = ops.having(shape="same")


def fold_shapes(gm: fx.GraphModule) -> fx.GraphModule:
    """Fold sizes, ranks, arithmetic over them and torch._assert."""
    resized = _resized(gm)
    read_inputs(gm, resized)
    asked: dict[Any, fx.Node] = {}
    for node in gm.graph.nodes:
        if is_call(node, *ops.SHAPE):
            if resized and not resized.isdisjoint(_sources(node)):
                continue  # the answer is another one further down
            while is_call(node.args[0], *_SAME_SHAPE) and not node.args[0].kwargs.get("post_ops"):
                node.args = (node.args[0].args[0], *node.args[1:])
            if node.target is ops.rank:
                fold_rank(node, asked)
        elif is_call(node, *(ARITHMETIC - {operator.getitem})):
            if not node.all_input_nodes:
                replace(node, node.target(*node.args, **node.kwargs))
            elif is_shape(node):
                ask_once(node, asked)
        elif is_call(node, torch._assert) and (node.args[0] is True or not ask_once(node, asked)):
            gm.graph.erase_node(node)
    return finish(gm)


def _resized(gm: fx.GraphModule) -> set[fx.Node]:
    """What may have other sizes further down: methods such as unsqueeze_ change those of a tensor in place."""
    if not any(map(resizes, gm.graph.nodes)):
        return set()
    aliasing = Aliasing(gm)
    written = [n for writer, written in aliasing.writers.items() if resizes(writer) for n in written]
    return {member for node in written for member in aliasing.members(node)}


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """What node may be asked of: its operand, and whatever that is computed from."""
    seen, pending = set[fx.Node](), [node]
    while pending:
        new = [source for source in pending.pop().all_input_nodes if source not in seen]
        seen.update(new)
        pending += new
        yield from new


def fold_rank(node: fx.Node, asked: dict[Any, fx.Node]) -> None:
    """Answer how many dimensions a value has, or ask it of the earliest value that has as many."""
    if (known := rank(node.args[0])) is not None:
        replace(node, known)
    else:
        node.args = (rank_source(node.args[0]),)
        ask_once(node, asked)


def ask_once(node: fx.Node, asked: dict[Any, fx.Node]) -> bool:
    """Let the readers of node read an equal node before it. Return whether there was none."""
    arguments = node.args[:1] if node.target is torch._assert else node.args  # whatever the message
    if node.kwargs or not all(isinstance(argument, fx.Node | int | float) for argument in arguments):
        return True
    first = asked.setdefault((node.target, *((type(argument), argument) for argument in arguments)), node)
    if first is not node:
        node.replace_all_uses_with(first)
    return first is node


def read_inputs(gm: fx.GraphModule, resized: set[fx.Node]) -> None:
    """Read every free size off one input of the graph, but for those whose sizes change."""
    inputs: dict[Any, tuple[int, fx.Node, int]] = {}  # size -> (free sizes of the input, input, dimension)
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and node not in resized:
            free = {dim: size.node.expr for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt)}
            for dim, size in free.items():
                if size not in inputs or len(free) < inputs[size][0]:
                    inputs[size] = len(free), node, dim
    for node in gm.graph.find_nodes(op="call_function", target=ops.size):
        size = node.meta.get("val")
        if isinstance(size, torch.SymInt) and size.node.expr in inputs:
            node.args = inputs[size.node.expr][1:]
