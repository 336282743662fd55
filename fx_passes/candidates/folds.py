"""Folded weights that only convolutions read: computed when they are packed, one after the other.

Until then shapes are enough. Computed all at once, they would take as much memory as the parameters, for a moment only,
and each page of it costs a fault. One alone is packed while it is in cache.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fx_passes import ops
from fx_passes.graph.graph import is_call

_LATE = (ops.fold_bn_weight, ops.scale_channels)  # weight [O, ...] times a factor per output


def is_late(node: fx.Node) -> bool:
    """Whether node is a fold that nothing reads but convolutions, as their weight."""
    return is_call(node, *_LATE) and bool(node.users) and all(_reads_weight(user, node) for user in node.users)


def _reads_weight(user: fx.Node, node: fx.Node) -> bool:
    if not is_call(user, ops.convolution) or [argument is node for argument in user.args[:3]] != [False, True, False]:
        return False
    found: list[fx.Node] = []
    fx.map_arg((user.args[3:], user.kwargs), found.append)
    return node not in found


def bound(node: fx.Node, weight: torch.Tensor, others: tuple[object, ...]) -> float:
    """No number of a late fold of weight is larger, rounding aside; not a number where an argument has one.

    others  the further arguments of node
    """
    ones = torch.ones(weight.shape[0], *(1 for _ in weight.shape[1:]), dtype=torch.float64, device="cpu")
    return largest_absolute(weight) * largest_absolute(node.target(ones, *others))


def largest_absolute(values: torch.Tensor) -> float:
    """The largest absolute value; nan where there is one."""
    low, high = (float(number) for number in torch.aminmax(values))
    return math.nan if math.isnan(low) or math.isnan(high) else max(-low, high)
