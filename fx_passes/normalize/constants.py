"""Functions of parameters alone that the vocabulary has no spelling for: standardized weights, weight norms, gains.

    Before: w = F.batch_norm((weight * gain).view(1, 8, -1), None, None, training=True); conv2d(x, w.reshape_as(weight))
    After:  the same nodes, marked meta["constant"]: whoever reads them evaluates them once

Only what is sure to give the same each time: PyTorch's own functions that write nothing and draw no random numbers.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fx_passes.aliasing.effects import NUMBERS
from fx_passes.graph.graph import argument, is_call, is_constant, is_pure

_OPERATORS: frozenset[Callable[..., Any]] = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
     operator.neg, operator.abs, operator.matmul, operator.getitem, operator.gt, operator.ge, operator.lt, operator.le,
     operator.eq, operator.ne, operator.and_, operator.or_, operator.invert}
)  # fmt: skip
_BEYOND_ATEN = {"float", "double", "half", "bfloat16", "normalize"}  # no operators, yet nothing but functions
_STATISTICS = {"batch_norm", "instance_norm"}  # write to running statistics where they are given any
_OTHER = {"empty", "empty_like", "new_empty", "empty_strided", "resize_as"}


def fold_function(node: fx.Node) -> None:
    """Mark node as a constant if it computes one from constants; a method becomes a function."""
    function = constant_function(node)
    if function is not None and node.all_input_nodes and all(map(is_constant, node.all_input_nodes)):
        node.op, node.target = "call_function", function
        node.meta["constant"] = True


def is_folded(node: Any) -> bool:
    """Whether fold_function marked node: a tensor, or a tuple of several."""
    return isinstance(node, fx.Node) and node.op == "call_function" and bool(node.meta.get("constant"))


def constant_function(node: fx.Node) -> Callable[..., Any] | None:
    """The function that node calls, if its results follow from its arguments."""
    if node.op == "call_method":
        function = _of_method(node.target)
    elif node.op == "call_function":
        function = node.target
    else:
        return None
    if isinstance(function, torch._ops.OpOverload):
        return function if is_pure(node) else None
    if is_call(node, *_OPERATORS):
        return function
    if function is None or node.kwargs.get("out") is not None or not _is_torch(function):
        return None
    name = function.__name__
    if name in _STATISTICS and argument(node, 1, "running_mean") is not None:
        return None
    return function if name in _BEYOND_ATEN or _is_deterministic(name) else None


def _of_method(name: str) -> Callable[..., Any] | None:
    """Tensor.name as a function that generated code can spell."""
    method = getattr(torch.Tensor, name, None)
    return method if isinstance(method, types.MethodDescriptorType) else getattr(torch, name, None)


def _is_torch(function: Callable[..., Any]) -> bool:
    owner = getattr(function, "__objclass__", None) or function
    return (getattr(owner, "__module__", None) or "").partition(".")[0] == "torch"


def _is_deterministic(name: str) -> bool:
    """Whether aten has operators of that name, none of which draws random numbers or writes by its name."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name in NUMBERS | _OTHER or name.endswith("_"):
        return False
    return not any(torch.Tag.nondeterministic_seeded in getattr(packet, form).tags for form in packet.overloads())
