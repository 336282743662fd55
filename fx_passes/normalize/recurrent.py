"""nn.LSTM, nn.GRU, nn.RNN and their cells as operations with several results.

Before: y, (h, c) = self.lstm(x)
After:  found = ops.recurrent(x, None, (weight_ih_l0, ...), "lstm", ...); y, h, c = found[0], found[1], found[2]
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from fx_passes.graph.graph import is_call
from fx_passes.graph.inference import is_tensor
from fx_passes.spellings.recurrent import arranged, module_call
from fx_passes.spellings.registry import Alias, Built, Call
from fx_passes.trace.assumptions import Assumption


def build_recurrent(
    node: fx.Node, module: Any, p: Callable[[str], Any], rest_on: Callable[[Assumption], None] | None = None
) -> Built:
    """Rewrite the readers of node, where its states are known to be tensors; node itself is then dead.

    rest_on  has each call compared with what is assumed of its arguments: states that are one are tensors
    """
    try:
        bound = inspect.signature(module.forward).bind(*node.args, **node.kwargs)
    except TypeError:
        return None
    graph, (src, *states) = node.graph, bound.args
    given: Any = states[0] if states else None
    if rest_on is not None and _is_argument(given) and not is_tensor(given):
        call = _call_on_argument(node, module, p, src, given, rest_on)
    else:
        call = module_call(module, p, src, given)
    if call is None:
        return None
    with graph.inserting_before(node):
        found = graph.create_node("call_function", call.op, call.args, call.kwargs, name=f"{node.name}_{call.args[3]}")
        found.meta["source"] = f"{type(module).__name__} {node.target}"
        _let_readers_read(node, arranged(call, lambda i: graph.call_function(operator.getitem, (found, i))))
    return Alias(found)


def _is_argument(given: Any) -> bool:
    """Whether states are an argument of the model's."""
    return isinstance(given, fx.Node) and given.op == "placeholder" and not str(given.target).startswith("*")


def _call_on_argument(
    node: fx.Node,
    module: Any,
    p: Callable[[str], Any],
    src: Any,
    given: fx.Node,
    rest_on: Callable[[Assumption], None],
) -> Call | None:
    """What the module computes where the argument is a tensor, of an LSTM a pair; other calls are of another kind."""
    states: Any = given
    name, before = str(given.target), given.type
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        with node.graph.inserting_before(node):
            states = tuple(node.graph.call_function(operator.getitem, (given, i)) for i in range(2))
        assumed = [Assumption(name, (), tuple), *(Assumption(name, (("item", i),), None) for i in range(2))]
    else:
        given.type, assumed = Tensor, [Assumption(name, (), None)]
    call = module_call(module, p, src, states)
    if call is None:
        given.type = before
        return None
    for each in assumed:
        rest_on(each)
    return call


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
