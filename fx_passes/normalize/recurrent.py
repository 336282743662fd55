"""nn.LSTM, nn.GRU, nn.RNN and their cells as operations with several results.

Before: y, (h, c) = self.lstm(x)
After:  found = ops.recurrent(x, None, (weight_ih_l0, ...), "lstm", ...); y, h, c = found[0], found[1], found[2]
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from fx_passes import ops
from fx_passes.graph.graph import is_call
from fx_passes.spellings.recurrent import cell, stack
from fx_passes.spellings.registry import Alias, Built, Call, refusal

STACKS: tuple[type[nn.Module], ...] = (nn.LSTM, nn.GRU, nn.RNN)
CELLS: tuple[type[nn.Module], ...] = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)


def build_recurrent(node: fx.Node, module: Any, p: Callable[[str], Any]) -> Built:
    """Rewrite the readers of node, where its states are known to be tensors; node itself is then dead."""
    try:
        bound = inspect.signature(module.forward).bind(*node.args, **node.kwargs)
    except TypeError:
        return None
    if refusal(module) or (module.training and getattr(module, "dropout", 0.0)) or not _is_plain(module):
        return None
    src, given = (*bound.args, None)[:2]
    kind = _kind(module)
    states: Any = None
    if given is not None:
        if kind == "lstm" and (not isinstance(given, list | tuple) or len(given) != 2):
            return None
        states = tuple(given) if kind == "lstm" else (given,)
    if type(module) in CELLS:
        weights = [p(name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        built = cell(src, states, weights, kind)
    else:
        names = [name for names in module._all_weights for name in names]
        settings = module.bias, module.num_layers, module.bidirectional, module.batch_first
        built = stack(src, states, [p(name) for name in names], kind, *settings)
    if not isinstance(built, Call):
        return None
    graph = node.graph
    with graph.inserting_before(node):
        found = graph.create_node("call_function", built.op, built.args, built.kwargs, name=f"{node.name}_{kind}")
        found.meta["source"] = f"{type(module).__name__} {node.target}"
        results = [graph.call_function(operator.getitem, (found, i)) for i in range(1 + (kind == "lstm"))]
        if built.op is ops.recurrent:
            results.append(graph.call_function(operator.getitem, (found, len(results))))
            first, *last = results
            _let_readers_read(node, (first, tuple(last) if kind == "lstm" else last[0]))
        else:
            _let_readers_read(node, tuple(results) if kind == "lstm" else results[0])
    return Alias(found)


def _kind(module: Any) -> str:
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return "lstm"
    return "gru" if isinstance(module, nn.GRU | nn.GRUCell) else f"rnn_{module.nonlinearity}"


def _is_plain(module: Any) -> bool:
    """Whether all weights are the module's parameters, and those that it computes with."""
    names = [name for names in getattr(module, "_all_weights", ()) for name in names]
    flat = getattr(module, "_flat_weights", ())
    own = [module._parameters.get(name) for name in names]
    return all(weight is not None for weight in own) and all(a is b for a, b in zip(own, flat, strict=True))


def _let_readers_read(node: fx.Node, value: Any) -> None:
    """Let everyone who reads node read value, a node or a nested tuple of nodes, and items of a tuple themselves."""
    if isinstance(value, fx.Node):
        node.replace_all_uses_with(value)
        return
    for user in list(node.users):
        if is_call(user, operator.getitem) and user.args[0] is node and _is_index(user.args[1], value):
            _let_readers_read(user, value[user.args[1]])
            user.graph.erase_node(user)
        else:
            user.args, user.kwargs = fx.node.map_arg(
                (user.args, user.kwargs), lambda argument: value if argument is node else argument
            )


def _is_index(item: Any, value: Sequence[Any]) -> bool:
    return type(item) is int and -len(value) <= item < len(value)
