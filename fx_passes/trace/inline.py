"""Inline what torch.export wraps into calls of subgraphs because of a mode that was on: no_grad(), autocast(False).

Before: wrap_with_autocast("cpu", None, False, None, submod_0, x) -> getitem(.., 0)
After:  the nodes of submod_0
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fx_passes.graph.graph import get_attribute, is_call, replace


def inline_modes(gm: fx.GraphModule) -> None:
    """Inline every subgraph that computes the same without its mode, where gradients and autocast are off."""
    for node in list(gm.graph.nodes):
        if (match := match_mode(gm, node)) is not None:
            _inline(node, *match)


def match_mode(gm: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, tuple[Any, ...]] | None:
    """(subgraph, its operands) of a call that may be inlined."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    if name == "wrap_with_set_grad_enabled":
        subgraph, *operands = node.args[1:]
    elif name == "wrap_with_autocast" and node.args[2] is False:
        subgraph, *operands = node.args[4:]
    else:
        return None
    if not isinstance(subgraph, fx.Node) or subgraph.op != "get_attr" or node.kwargs:
        return None
    inner = get_attribute(gm, subgraph.target)
    if not isinstance(inner, fx.GraphModule) or any(n.op in ("get_attr", "call_module") for n in inner.graph.nodes):
        return None
    if not all(is_call(user, operator.getitem) for user in node.users):
        return None
    return inner, tuple(operands)


def _inline(node: fx.Node, inner: fx.GraphModule, operands: tuple[Any, ...]) -> None:
    """Put the nodes of inner in place of node and of what takes its results apart."""
    placeholders = inner.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = dict(zip(placeholders, operands, strict=True))
    with node.graph.inserting_before(node):
        results: Any = node.graph.graph_copy(inner.graph, copies)
    subgraph: Any = node.args[1] if isinstance(node.args[1], fx.Node) else node.args[4]
    for user in list(node.users):
        replace(user, results[user.args[1]])
    node.graph.erase_node(node)
    if not subgraph.users:
        node.graph.erase_node(subgraph)
