"""A recurrent network that is the whole model: torch.fx cannot trace its forward, which its type tells all about."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from fx_passes.graph.graph import get_attribute
from fx_passes.spellings.recurrent import CELLS, STACKS, arranged, module_call


def graph_of_recurrent(root: nn.Module, specialized: Mapping[str, Any]) -> fx.Graph | None:
    """The graph of an nn.LSTM, GRU, RNN or cell called without states; None for any other module."""
    if type(root) not in (*STACKS, *CELLS) or specialized.get("hx", root) is not None:
        return None
    graph = fx.Graph()
    src = graph.placeholder("input")
    graph.placeholder("hx", default_value=None)
    call = module_call(root, lambda name: graph.get_attr(name) if get_attribute(root, name) is not None else None, src)
    if call is None:
        return None
    found = graph.call_function(call.op, call.args, dict(call.kwargs))
    found.meta["source"] = type(root).__name__
    graph.output(arranged(call, lambda i: graph.call_function(operator.getitem, (found, i))))
    return graph
