"""Modules of PyTorch that return tuples return tuples while they are traced, too.

A proxy is no tuple: `h[0] if isinstance(h, tuple) else h` would take the wrong branch, and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from fx_passes.graph.hooks import has_hooks


def in_tuples(module: nn.Module, result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of a module that was traced as one operation, in the tuples that it comes in.

    Subclasses and modules with hooks may return anything: theirs stays as it is.
    """
    cls = type(module)
    if not isinstance(result, fx.Proxy) or has_hooks(module):
        return result
    if cls is nn.LSTM:
        return result[0], (result[1][0], result[1][1])
    if cls in (nn.GRU, nn.RNN, nn.LSTMCell):
        return result[0], result[1]
    if cls is nn.MultiheadAttention:
        wanted = kwargs.get("need_weights", args[4] if len(args) > 4 else True)
        if isinstance(wanted, bool):
            return result[0], result[1] if wanted else None
    return result
