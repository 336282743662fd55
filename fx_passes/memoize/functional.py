"""Which calls in a captured graph compute a tensor and do nothing else, in the spellings that TorchDynamo leaves.

torch.export leaves operators, whose schemas say it. TorchDynamo leaves methods, Python's operators and functions of
torch: they are looked up by their names among the operators of aten.
"""

from __future__ import annotations

import functools
import operator

import torch
from torch import Tensor, fx

# Python's operators whose names are not those of aten.
_OPERATORS = {
    operator.and_: "__and__", operator.or_: "__or__", operator.xor: "__xor__", operator.invert: "bitwise_not",
    operator.truediv: "div", operator.floordiv: "floor_divide", operator.mod: "remainder", operator.getitem: "index",
    operator.lshift: "__lshift__", operator.rshift: "__rshift__", operator.matmul: "matmul",
}  # fmt: skip
_CASTS = frozenset(("bool", "byte", "char", "short", "int", "long", "half", "bfloat16", "float", "double"))  # methods
_STATISTICS = ("batch_norm", "instance_norm")  # which they may update, and their schemas do not say so
_MODULES = ("_operator", "torch", "torch.functional", "torch._tensor")


def is_functional(node: fx.Node) -> bool:
    """Whether node is a function of torch, a method of a tensor, or an operator on one, that writes to nothing.

    The same call gives the same: it draws no random numbers.
    """
    if node.op == "call_method":
        first = node.args[0] if node.args else None
        is_of_tensor = isinstance(first, fx.Node) and isinstance(first.meta.get("val"), Tensor)
        return is_of_tensor and (node.target in _CASTS or _only_computes(node.target))
    if node.op != "call_function" or "out" in node.kwargs or isinstance(node.target, torch._ops.OpOverload):
        return False
    name = _OPERATORS.get(node.target) or getattr(node.target, "__name__", "")
    return _is_of_torch(node.target) and _only_computes(name)


def _is_of_torch(target: object) -> bool:
    module = getattr(target, "__module__", None)
    if module is None:  # torch.where and the like are methods of a class that holds them
        return getattr(torch, getattr(target, "__name__", ""), None) is target
    return module in _MODULES


@functools.cache
def _only_computes(name: str) -> bool:
    """Whether all operators of aten of this name, but those that are told where to write, only compute."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket) or name.endswith(_STATISTICS):
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    found = [each for each in overloads if not any(row.is_out for row in each._schema.arguments)]
    return bool(found) and all(
        bool(each._schema.returns)
        and not each._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in each.tags
        for each in found
    )
