"""What explain() says of nodes outside of regions: sizes, assertions, moved data, and why PyTorch computes the rest."""

from __future__ import annotations

import builtins
import math
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fx_passes.bags.offset_bags import JoinedOffsetBags
from fx_passes.memoize.masks import asked_once
from fx_passes.report.drawing import called
from fx_passes.report.explanation import NodeExplanation
from fx_passes.trace.outputs import Remake

if TYPE_CHECKING:
    from fx_passes.module import OptimizedModule

_ABOUT_TENSORS = ("size", "dim", "numel", "stride", "is_floating_point")  # methods that return numbers
_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda")
_ARITHMETIC = (math.__name__, operator.add.__module__, builtins.__name__)
_REASONS = {
    "number": "a number, no tensor",
    "check": "an assertion",
    "movement": "moves data, computes nothing",
    "container": "puts results together, computes nothing",
}


def explain_outside(node: fx.Node, gm: OptimizedModule) -> NodeExplanation:
    """Return what a node of the outer graph, which is no call of a region, is."""
    became, described = _became(node), _described(node, gm)
    source = str(node.meta.get("source", called(node)))
    if described:
        return NodeExplanation("", "", node.name, source, "embedding_bags", "torch", "", (), described)
    implementation = "torch" if became in ("torch", "movement") else ""
    reason = _REASONS.get(became) or _why_torch(node, gm)
    return NodeExplanation("", "", node.name, source, became, implementation, "", (), reason)


def _described(node: fx.Node, gm: OptimizedModule) -> str:
    """What the module of the bags of all tables says of itself."""
    module = gm.get_submodule(str(node.target)) if node.op == "call_module" and node.target not in gm.leaves else None
    return module.described if isinstance(module, JoinedOffsetBags) else ""


def _became(node: fx.Node) -> str:
    from fx_passes import ops

    if "assert" in str(getattr(node.target, "__name__", node.target)):
        return "check"
    if isinstance(node.target, Remake):
        return "container"
    if _is_number(node):
        return "number"
    pieces = node.target is operator.getitem and isinstance(node.args[0], fx.Node)
    moved = node.args[0].target if pieces else node.target  # a piece of what was split
    return "movement" if moved in ops.MOVEMENT or moved in (torch.unbind, asked_once) else "torch"


def _is_number(node: Any) -> bool:
    """Whether a value is known to be no tensor: a size, a dtype, arithmetic on such, tuples of them."""
    from fx_passes import ops

    pending = [node]
    while pending:  # not recursive: sums of sizes may be long
        value = pending.pop()
        if not isinstance(value, fx.Node) or value.target in ops.SHAPE:
            continue
        if "val" in value.meta:
            if _holds_tensors(value.meta["val"]):
                return False
        elif value.op == "call_method":
            if value.target not in _ABOUT_TENSORS:
                return False
        elif value.target is getattr:
            if value.args[1] not in _ATTRIBUTES:
                return False
        elif value.op == "call_function" and getattr(value.target, "__module__", "") in _ARITHMETIC:
            pending += value.all_input_nodes
        else:
            return False
    return True


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in torch.utils._pytree.tree_leaves(value))


def _why_torch(node: fx.Node, gm: OptimizedModule) -> str:
    from fx_passes.graph.graph import is_vocabulary
    from fx_passes.memoize.memoised import Memoised
    from fx_passes.whole_model import WholeModel

    if isinstance(node.target, WholeModel):
        return gm.leaves.get("", "") or "the model is called as a whole"
    if node.op == "call_module" and isinstance(node.target, str):
        if node.target in gm.leaves:
            return gm.leaves[node.target]
        if isinstance(gm.get_submodule(node.target), Memoised):
            return "depends on sizes or masks alone: computed when they change, and remembered"
    if refused := node.meta.get("refused"):
        return str(refused)
    if is_vocabulary(node):
        return "alone between operations that regions do not know: too little for a region"
    return "not an operation that regions know"
