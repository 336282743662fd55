"""The mathematics of attributes, in float64: scales, zero points and chains of post-operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from zendnn_cffi.primitives.attributes import (
    ARG_ATTR_OUTPUT_SCALES,
    ARG_ATTR_POST_OP_DW,
    ARG_ATTR_SCALES,
    ARG_ATTR_ZERO_POINTS,
    ARG_BIAS,
    ARG_DST,
    ARG_SRC,
    ARG_WEIGHTS,
    RUNTIME,
    Attr,
    arg_post_op,
)

Values = Mapping[int, torch.Tensor]

# kind -> f(x, alpha, beta), as zendnn_types.h names them
ELTWISE: dict[str, Callable[[torch.Tensor, float, float], torch.Tensor]] = {
    "relu": lambda x, a, b: torch.where(x > 0, x, a * x),
    "pow": lambda x, a, b: a * x**b,
    "tanh": lambda x, a, b: x.tanh(),
    "gelu_erf": lambda x, a, b: F.gelu(x),
    "elu": lambda x, a, b: torch.where(x > 0, x, a * x.expm1()),
    "round": lambda x, a, b: x.round(),
    "square": lambda x, a, b: x * x,
    "logsigmoid": lambda x, a, b: F.logsigmoid(x),
    "abs": lambda x, a, b: x.abs(),
    "mish": lambda x, a, b: F.mish(x),
    "sqrt": lambda x, a, b: x.sqrt(),
    "hardswish": lambda x, a, b: F.hardswish(x),
    "linear": lambda x, a, b: a * x + b,
    "bounded_relu": lambda x, a, b: x.clamp(0, a),
    "soft_relu": lambda x, a, b: F.softplus(x),
    "logistic": lambda x, a, b: x.sigmoid(),
    "exp": lambda x, a, b: x.exp(),
    "gelu_tanh": lambda x, a, b: F.gelu(x, approximate="tanh"),
    "swish": lambda x, a, b: x * (a * x).sigmoid(),
    "log": lambda x, a, b: x.log(),
    "clip": lambda x, a, b: x.clamp(a, b),
    "clip_v2": lambda x, a, b: x.clamp(a, b),
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "div": torch.div,
    "sub": torch.sub,
    "ge": torch.ge,
    "gt": torch.gt,
    "le": torch.le,
    "lt": torch.lt,
    "eq": torch.eq,
    "ne": torch.ne,
}


def applied(x: torch.Tensor, attr: Attr, values: Values) -> torch.Tensor:
    """Return the primitive's plain result x, scaled, after its post-ops, in units of dst.

    values  the operands by argument id, float64; ARG_DST is what dst held before
    """
    x = x * _scales(x, attr, values)
    for index, entry in enumerate(attr.post_ops):
        x = _post_op(x, entry, index, values)
    zero = values.get(ARG_ATTR_ZERO_POINTS | ARG_DST)
    return x if zero is None else x + zero.reshape(-1)[0]


def _scales(x: torch.Tensor, attr: Attr, values: Values) -> torch.Tensor:
    """Return output scales, and those of source and weights, broadcast against the result."""
    total = x.new_ones(1)
    output = attr.output_scales
    if output is not None:
        given = values[ARG_ATTR_OUTPUT_SCALES] if output == RUNTIME else x.new_tensor(output)
        total = total * along(given, attr.output_scales_mask, x)
    for arg in (ARG_ATTR_SCALES | ARG_SRC, ARG_ATTR_SCALES | ARG_WEIGHTS):
        if arg in attr.runtime_args:
            total = total * along(values[arg], attr.runtime_args[arg][0], x)
    return total


def along(values: torch.Tensor, mask: int, like: torch.Tensor) -> torch.Tensor:
    """Return values shaped to vary along the dimensions whose bits are set, as ``like`` has them."""
    if values.numel() == 1:
        return values.reshape(1)
    return values.reshape([size if mask >> i & 1 else 1 for i, size in enumerate(like.shape)])


def _post_op(x: torch.Tensor, entry: tuple[Any, ...], index: int, values: Values) -> torch.Tensor:
    match entry:
        case ("eltwise", kind, alpha, beta, scale):
            return scale * ELTWISE[kind](x, alpha, beta)
        case ("sum", scale, _):
            return x + scale * values[ARG_DST]
        case ("binary", kind, _):
            return BINARY[kind](x, values[arg_post_op(index)]).to(x.dtype)
        case ("prelu", mask):
            return torch.where(x > 0, x, x * along(values[arg_post_op(index, ARG_WEIGHTS)], mask, x))
        case ("depthwise", _, _, _, _, stride, padding):
            weights = values[ARG_ATTR_POST_OP_DW | ARG_WEIGHTS]
            bias = values.get(ARG_ATTR_POST_OP_DW | ARG_BIAS)
            return F.conv2d(x, weights.flatten(0, 1), bias, stride, padding, groups=x.shape[1])
    raise NotImplementedError(f"no reference for the post-op {entry!r}")
