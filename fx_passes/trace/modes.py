"""Keep whole what a captured graph computes under a mode: autocast, and function transforms (vmap, grad, jvp).

    Before: _enter_autocast -> linear -> relu -> _exit_autocast -> linear        (calls that switch, in program order)
    After:  under_mode_0 -> linear                                              (one module that switches and computes)

An operation means something else inside a mode than outside, and no edge of the graph says which of the two it is. So
no pass may move one in or out, or join it with others. What is inside stays plain PyTorch.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import nodes_in, unique_name
from fx_passes.trace.mapped import write_out_map

_TRANSFORM = re.compile(r"_(vmap|grad|jvp|func)_(increment|decrement)_nesting")
_ENABLING = ((torch._C._set_grad_enabled, (True,)), (torch.autograd.grad_mode._enter_inference_mode, (False,)))


class UnderMode(fx.GraphModule):
    """Part of a captured graph, from where it enters modes to where it has left them again.

    reads_numbers  whether it neither writes to, nor hands on, what it is given
    """

    reads_numbers = False


def keep_modes_whole(root: nn.Module, graph: fx.Graph) -> None:
    """Replace each part of graph that runs under a mode by one call of a new submodule of root.

    Autocast that is switched off counts only where it is on around the graph. Maps of element-wise operations are
    written out.
    """
    for part in _parts(graph):
        if not write_out_map(graph, part):
            _move(root, graph, part)
    graph.lint()


def turns_gradients_on(gm: fx.GraphModule) -> bool:
    """Whether a captured graph keeps gradients where the call does not: in parts under enable_grad(), as guidance is.

    Transforms (grad, vjp, jacrev) switch gradients on for themselves: what they return has none of the graph around.
    """
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    return any(_turns_gradients_on(graph) for graph in graphs)


def _turns_gradients_on(graph: fx.Graph) -> bool:
    depth = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if transform := _TRANSFORM.fullmatch(getattr(node.target, "__name__", "")):
            depth += (1 if transform[2] == "increment" else -1) if transform[1] == "grad" else 0
        elif depth == 0 and (node.target, node.args[:1]) in _ENABLING:
            return True
    return False


def _parts(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes of each part, from the call that enters the outermost mode to the one that leaves it."""
    parts: list[list[fx.Node]] = []
    depth, entered = 0, set[fx.Node]()
    for node in graph.nodes:
        step = _step(node, entered)
        if depth == 0 and step > 0:
            parts.append([])
        if depth or step > 0:
            parts[-1].append(node)
        depth += step
    return [[node for node in part if node.op.startswith("call_")] for part in parts]


def _step(node: fx.Node, entered: set[fx.Node]) -> int:
    """1 where node enters a mode, -1 where it leaves one; entered: the calls that entered autocast."""
    if node.op != "call_function":
        return 0
    name = getattr(node.target, "__name__", "")
    if transform := _TRANSFORM.fullmatch(name):
        return 1 if transform[2] == "increment" else -1
    if name == "_enter_autocast" and _changes_autocast(*node.args, **node.kwargs):
        entered.add(node)
        return 1
    return -1 if name == "_exit_autocast" and node.args[0] in entered else 0


def _changes_autocast(device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> bool:
    return device_type == "cpu" and (enabled or torch.is_autocast_enabled("cpu"))


def _move(root: nn.Module, graph: fx.Graph, part: Sequence[fx.Node]) -> None:
    """Put one call in place of part."""
    inside = set(part)
    sources = list(dict.fromkeys(s for node in part for s in nodes_in((node.args, node.kwargs)) if s not in inside))
    results = [node for node in part if any(user not in inside for user in node.users)]
    inner = fx.Graph()
    copies: dict[fx.Node, Any] = {source: inner.placeholder(source.name) for source in sources}
    for node in part:
        copies[node] = inner.node_copy(node, copies.__getitem__)
    inner.output(tuple(copies[node] for node in results))
    module = UnderMode(root, inner, "UnderMode")
    module.reads_numbers = _only_reads(module, [copies[node] for node in (*sources, *results)], len(sources))
    name = unique_name(root, "under_mode")
    root.add_module(name, module)
    with graph.inserting_after(part[-1]):
        call = graph.call_module(name, tuple(sources))
    for number, node in reversed([*enumerate(results)]):
        with graph.inserting_after(call):
            taken = graph.call_function(operator.getitem, (call, number))
        taken.meta.update({key: value for key, value in node.meta.items() if key == "val"})
        node.replace_all_uses_with(taken, delete_user_cb=lambda user: user not in inside)
    for node in reversed(part):
        graph.erase_node(node)


def _only_reads(module: fx.GraphModule, ends: Sequence[fx.Node], inputs: int) -> bool:
    """Whether nothing writes to the first of ends, the inputs, and the others, the results, share no memory of them."""
    aliasing = Aliasing(module)
    given = {id(aliasing.members(node)) for node in ends[:inputs]}
    shared = any(id(aliasing.members(node)) in given for node in ends[inputs:])
    return not shared and not any(map(aliasing.is_written, ends[:inputs]))
