"""nn.LSTM, nn.GRU, nn.RNN and their cells as operations with several results.

Before: y, (h, c) = self.lstm(x)
After:  found = ops.recurrent(x, None, (weight_ih_l0, ...), "lstm", ...); y, h, c = found[0], found[1], found[2]
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fx_passes.graph.graph import is_call
from fx_passes.spellings.recurrent import arranged, module_call
from fx_passes.spellings.registry import Alias, Built


def build_recurrent(node: fx.Node, module: Any, p: Callable[[str], Any]) -> Built:
    """Rewrite the readers of node, where its states are known to be tensors; node itself is then dead."""
    try:
        bound = inspect.signature(module.forward).bind(*node.args, **node.kwargs)
    except TypeError:
        return None
    call = module_call(module, p, *bound.args)
    if call is None:
        return None
    graph = node.graph
    with graph.inserting_before(node):
        found = graph.create_node("call_function", call.op, call.args, call.kwargs, name=f"{node.name}_{call.args[3]}")
        found.meta["source"] = f"{type(module).__name__} {node.target}"
        _let_readers_read(node, arranged(call, lambda i: graph.call_function(operator.getitem, (found, i))))
    return Alias(found)


def _let_readers_read(node: fx.Node, value: Any) -> None:
    """Let everyone who reads node read value, a node or a nested tuple of nodes, and items of a tuple themselves."""
    if isinstance(value, fx.Node):
        node.replace_all_uses_with(value)
        return

    def instead(argument: fx.Node) -> Any:
        return value if argument is node else argument

    for user in list(node.users):
        if is_call(user, operator.getitem) and user.args[0] is node and _is_index(user.args[1], value):
            _let_readers_read(user, value[user.args[1]])
            user.graph.erase_node(user)
        else:
            user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), instead)


def _is_index(item: Any, value: Sequence[Any]) -> bool:
    return type(item) is int and -len(value) <= item < len(value)
