"""Which calls in a captured graph compute a tensor and do nothing else, in the spellings that TorchDynamo leaves.

torch.export leaves operators, whose schemas say it. TorchDynamo leaves methods, Python's operators and functions of
torch: they are looked up by their names among the operators of aten.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fx_passes.aliasing.schemas import only_computes
from fx_passes.graph.graph import example, is_call
from fx_passes.graph.inference import is_tensor

# Python's operators whose names are not those of aten.
_OPERATORS = {
    operator.and_: "__and__", operator.or_: "__or__", operator.xor: "__xor__", operator.invert: "bitwise_not",
    operator.truediv: "div", operator.floordiv: "floor_divide", operator.mod: "remainder", operator.getitem: "index",
    operator.lshift: "__lshift__", operator.rshift: "__rshift__", operator.matmul: "matmul",
}  # fmt: skip
_CASTS = frozenset(("bool", "byte", "char", "short", "int", "long", "half", "bfloat16", "float", "double"))  # methods
_MODULES = ("_operator", "torch", "torch.functional", "torch._tensor")


def is_functional(node: fx.Node) -> bool:
    """Whether node is a function of torch, a method of a tensor, or an operator on one, that writes to nothing.

    The same call gives the same: it draws no random numbers.
    """
    if node.op == "call_method":
        is_of_tensor = bool(node.args) and gives_tensor(node.args[0])
        return is_of_tensor and (node.target in _CASTS or only_computes(node.target))
    if node.op != "call_function" or "out" in node.kwargs or isinstance(node.target, torch._ops.OpOverload):
        return False
    name = _OPERATORS.get(node.target) or getattr(node.target, "__name__", "")
    return _is_of_torch(node.target) and only_computes(name)


def gives_tensor(node: Any) -> bool:
    """Whether node is a tensor for certain, in graphs without examples of their values, too."""
    if not isinstance(node, fx.Node) or "val" in node.meta:
        return example(node) is not None
    if isinstance(node.target, torch._ops.OpOverload):
        returns = node.target._schema.returns
        return len(returns) == 1 and str(returns[0].type) == "Tensor"
    if node.op == "call_method":
        return node.target in _CASTS and gives_tensor(node.args[0])
    if is_call(node, operator.getitem) and all(map(gives_tensor, node.args)):  # a table's rows
        return True
    return is_tensor(node)


def _is_of_torch(target: object) -> bool:
    module = getattr(target, "__module__", None)
    if module is None:  # torch.where and the like are methods of a class that holds them
        return getattr(torch, getattr(target, "__name__", ""), None) is target
    return module in _MODULES
