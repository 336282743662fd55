"""Drop conversions to float32 and back around a softmax of 16 bits: it computes in float32 inside anyway.

Before: softmax(x.float(), -1).to(torch.bfloat16), F.softmax(x, -1, dtype=torch.float32).to(torch.bfloat16)
After:  softmax(x, -1)
Needs:  normalize (softmax without dtype= is vocabulary), meta["val"]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.fold.casts import dtype_of, is_cast
from fx_passes.graph.graph import argument, finish, is_call, only_user

_NARROW = (torch.bfloat16, torch.float16)
_FUNCTIONS = (F.softmax, torch.softmax, torch.ops.aten.softmax.int)


def fold_wide_softmax(gm: fx.GraphModule) -> fx.GraphModule:
    """Fold every softmax whose result is converted to its source's dtype, and read by nobody else."""
    matches = [(node, match) for node in gm.graph.nodes if (match := match_wide(node)) is not None]
    if not matches:
        return gm
    aliasing = Aliasing(gm)
    for node, (wide, source, dim) in matches:
        read = argument(wide, 0, "input")
        if not aliasing.is_written_between((source, read), wide if read is source else read, node):
            node.op, node.target, node.args, node.kwargs = "call_function", ops.softmax, (source, dim), {}
            node.meta.setdefault("source", "softmax")
            gm.graph.erase_node(wide)
    return finish(gm)


def match_wide(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """(the softmax, its source, its dimension) in front of a conversion to the source's dtype, bf16 or f16."""
    if not is_cast(node) or dtype_of(node) not in _NARROW:
        return None
    wide: Any = node.args[0]
    if only_user(wide) is None:
        return None
    source, dim = argument(wide, 0, "input"), argument(wide, 1, "dim")
    if is_call(wide, ops.softmax):
        if argument(wide, 2, "log", False) or not isinstance(source, fx.Node) or not is_cast(source):
            return None
        source = source.args[0]
    elif not (is_call(wide, *_FUNCTIONS) or (wide.op == "call_method" and wide.target == "softmax")):
        return None
    if dtype_of(source) is not dtype_of(node) or dtype_of(wide) is not torch.float32 or type(dim) is not int:
        return None
    return wide, source, dim
