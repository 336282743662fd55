"""Where Winograd's algorithm applies, also in regions that compute in bf16.

The library has it in float32 alone, and there most 3x3 convolutions of large batches take less time than bf16's direct
arithmetic needs. So values around them may be float32 in a bf16 region: their producers write float32 where they can,
and layout assignment weighs that against conversions.
"""

from __future__ import annotations

import torch
from torch import fx

from fx_passes import ops
from fx_passes.lower.context import LoweringContext

_POOLS = (ops.pool, ops.adaptive_pool)


def takes_winograd(node: fx.Node, context: LoweringContext) -> bool:
    """Whether node is a dense 3x3 convolution of stride 1 without groups, with constant weights to transform."""
    if node.target is not ops.convolution or not context.allow_winograd:
        return False
    arguments = context.values.arguments(node)
    weight = arguments["weight"]
    if not isinstance(weight, torch.Tensor) or tuple(weight.shape[2:]) != (3, 3) or arguments["groups"] != 1:
        return False
    return {*arguments["stride"], *arguments["dilation"]} == {1}


def may_be_float32(node: fx.Node, context: LoweringContext) -> bool:
    """Whether a Winograd convolution reads node's value, itself or through pooling."""
    return any(
        takes_winograd(user, context) or (user.target in _POOLS and may_be_float32(user, context))
        for user in node.users
    )


def result_dtypes(node: fx.Node, dtype: torch.dtype, context: LoweringContext) -> tuple[torch.dtype, ...]:
    """The dtypes in which an operation that computes in dtype may leave its result."""
    return (dtype, torch.float32) if dtype == torch.bfloat16 and may_be_float32(node, context) else (dtype,)
