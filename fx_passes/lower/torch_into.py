"""PyTorch's functions that write their result into a tensor they are given: what may run inside the arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fx_passes.ops.pointwise import apply_post_ops

aten = torch.ops.aten

Into = Callable[..., Any]

# kind -> function(x, alpha, beta, out)
_ELTWISE: dict[str, Into] = {
    "relu": lambda x, a, b, out: aten.leaky_relu.out(x, a, out=out) if a else aten.clamp_min.out(x, 0, out=out),
    "gelu_erf": lambda x, a, b, out: aten.gelu.out(x, out=out),
    "gelu_tanh": lambda x, a, b, out: aten.gelu.out(x, approximate="tanh", out=out),
    "logistic": lambda x, a, b, out: torch.sigmoid(x, out=out),
    "tanh": lambda x, a, b, out: torch.tanh(x, out=out),
    "hardswish": lambda x, a, b, out: aten.hardswish.out(x, out=out),
    "hardsigmoid": lambda x, a, b, out: aten.hardsigmoid.out(x, out=out),
    "elu": lambda x, a, b, out: aten.elu.out(x, a, out=out),
    "clip": lambda x, a, b, out: torch.clamp(x, a, b, out=out),
    "clamp_min": lambda x, a, b, out: aten.clamp_min.out(x, a, out=out),
    "hardtanh": lambda x, a, b, out: torch.clamp(x, a, b, out=out),
    "exp": lambda x, a, b, out: torch.exp(x, out=out),
    "log": lambda x, a, b, out: torch.log(x, out=out),
    "sqrt": lambda x, a, b, out: torch.sqrt(x, out=out),
    "square": lambda x, a, b, out: torch.mul(x, x, out=out),
    "abs": lambda x, a, b, out: torch.abs(x, out=out),
    "mish": lambda x, a, b, out: aten.mish.out(x, out=out),
    "sin": lambda x, a, b, out: torch.sin(x, out=out),
    "cos": lambda x, a, b, out: torch.cos(x, out=out),
    "erf": lambda x, a, b, out: torch.erf(x, out=out),
    "expm1": lambda x, a, b, out: torch.expm1(x, out=out),
    "log1p": lambda x, a, b, out: torch.log1p(x, out=out),
    "reciprocal": lambda x, a, b, out: torch.reciprocal(x, out=out),
    "linear": lambda x, a, b, out: torch.mul(x, a, out=out).add_(b),
}

# kind -> function(x, y, out=)
BINARY_INTO: dict[str, Into] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip


def eltwise_into(kind: str, alpha: Any, beta: Any) -> Into | None:
    """function(x, out) for kind(x; alpha, beta), in place where out is x; None where PyTorch has none."""
    if kind == "swish" and alpha == 1.0:
        return lambda x, out: aten.silu.out(x, out=out)
    function = _ELTWISE.get(kind)
    if function is None:
        return None

    def compute(x: Tensor, out: Tensor) -> Any:
        return function(x, alpha, beta, out)

    return compute


def post_ops_into(result: Tensor, post_ops: Sequence[tuple[Any, ...]], out: Tensor) -> Any:
    """Write result after all post-ops, at least one, to out; the result itself may be written to."""
    for entry in post_ops[:-1]:
        result = _one_into(result, entry, result)
    return _one_into(result, post_ops[-1], out)


def _one_into(result: Tensor, entry: tuple[Any, ...], out: Tensor) -> Tensor:
    name, kind, *others = entry
    if name == "eltwise" and (function := eltwise_into(kind, *others)) is not None:
        function(result, out)
    elif name == "binary" and kind in BINARY_INTO and len(others) == 1 and isinstance(others[0], Tensor):
        BINARY_INTO[kind](result, others[0], out=out)
    else:
        out.copy_(apply_post_ops(result, [entry]))
    return out
