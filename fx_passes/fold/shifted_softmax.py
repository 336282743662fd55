"""Drop the subtraction of each row's own maximum in front of a softmax: it subtracts that maximum inside anyway.

Before: softmax(x - x.max(-1, keepdim=True).values, -1)
After:  softmax(x, -1)

Rows with an infinity, and rows of minus infinity alone, are NaN either way. Another number per row would not do: where
it is infinite or NaN, so is the difference, and x may be neither.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import argument, erase_unread, example, finish, is_call, only_user

_MAXIMA = (torch.max, torch.ops.aten.max.dim)


def fold_shifted_softmax(gm: fx.GraphModule) -> fx.GraphModule:
    """Let every such softmax read what was shifted, if nobody else reads the difference."""
    softmaxes = gm.graph.find_nodes(op="call_function", target=ops.softmax)
    matches = [(node, match) for node in softmaxes if (match := match_shifted(node)) is not None]
    if not matches:
        return gm
    aliasing = Aliasing(gm)
    for node, (difference, source, largest) in matches:
        if not aliasing.is_written_between((source, largest), largest, node):
            node.replace_input_with(difference, source)
            erase_unread(difference)
    return finish(gm)


def match_shifted(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(the difference, what is shifted, its maxima) in front of a softmax."""
    difference, dim = node.args[:2]
    if argument(node, 2, "log", False) or not is_call(difference, ops.binary) or only_user(difference) is None:
        return None
    source, largest, kind = difference.args
    if kind != "sub" or not isinstance(source, fx.Node) or not isinstance(largest, fx.Node):
        return None
    found = _maximum(largest)
    if found is None or found[0] is not source or not _is_same(found[1], dim, source):
        return None
    return difference, source, largest


def _maximum(node: fx.Node) -> tuple[Any, Any] | None:
    """(x, dim) where node has the maxima of x along dim, and that dimension still, of size 1."""
    if is_call(node, ops.reduce):
        x, kind, dims, keeps = node.args
        return (x, dims[0]) if kind == "max" and keeps is True and len(dims) == 1 else None
    if not is_call(node, operator.getitem, getattr) or node.args[1] not in (0, "values"):
        return None
    both = node.args[0]
    is_method = isinstance(both, fx.Node) and (both.op, both.target) == ("call_method", "max")
    if not (is_method or is_call(both, *_MAXIMA)) or argument(both, 2, "keepdim") is not True:
        return None
    return argument(both, 0, "input"), argument(both, 1, "dim")


def _is_same(first: Any, second: Any, source: fx.Node) -> bool:
    """Whether two numbers name one dimension of source."""
    if type(first) is not int or type(second) is not int:
        return False
    value = example(source)
    if first == second or value is None:
        return first == second
    return first % max(value.ndim, 1) == second % max(value.ndim, 1)  # of a number, 0 and -1 are one
