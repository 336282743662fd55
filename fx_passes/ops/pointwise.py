"""Element by element, and the chains of such that follow a product: post-ops."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_passes.ops.broadcasting import in_long_runs, is_plain
from fx_passes.ops.registry import COMPUTE, op

PostOps = Sequence[tuple[Any, ...]]


# kind -> f(x, alpha, beta). alpha and beta mean what ZenDNN's algorithm of that kind means by them. The last ones are
# none of its kinds: PyTorch computes them.
ELTWISE: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "relu": lambda x, a, b: F.leaky_relu(x, a) if a else F.relu(x),
    "gelu_erf": lambda x, a, b: F.gelu(x),
    "gelu_tanh": lambda x, a, b: F.gelu(x, approximate="tanh"),
    "swish": lambda x, a, b: F.silu(x) if a == 1 else x * torch.sigmoid(a * x),
    "logistic": lambda x, a, b: torch.sigmoid(x),
    "tanh": lambda x, a, b: torch.tanh(x),
    "hardswish": lambda x, a, b: F.hardswish(x),
    "hardsigmoid": lambda x, a, b: F.hardsigmoid(x),
    "elu": lambda x, a, b: F.elu(x, a),
    "clip": lambda x, a, b: torch.clamp(x, a, b),
    "clamp_min": lambda x, a, b: torch.clamp(x, a),  # relu of floating-point numbers, where a is 0 or 0.0
    "hardtanh": lambda x, a, b: F.hardtanh(x, a, b),  # clip of floating-point numbers; integers stay integers
    "linear": lambda x, a, b: (x if a == 1 else x * a) + b if b else x * a,
    "exp": lambda x, a, b: torch.exp(x),
    "log": lambda x, a, b: torch.log(x),
    "rsqrt": lambda x, a, b: torch.rsqrt(x),
    "sqrt": lambda x, a, b: torch.sqrt(x),
    "square": lambda x, a, b: torch.pow(x, b) if b else torch.square(x),  # 2.0 makes integers floating-point
    "abs": lambda x, a, b: torch.abs(x),
    "mish": lambda x, a, b: F.mish(x),
    "soft_relu": lambda x, a, b: F.softplus(x),
    "pow": lambda x, a, b: torch.pow(x, b) if a == 1 else a * torch.pow(x, b),
    "round": lambda x, a, b: torch.round(x),
    "sin": lambda x, a, b: torch.sin(x),
    "cos": lambda x, a, b: torch.cos(x),
    "erf": lambda x, a, b: torch.erf(x),
    "expm1": lambda x, a, b: torch.expm1(x),
    "log1p": lambda x, a, b: torch.log1p(x),
    "reciprocal": lambda x, a, b: torch.reciprocal(x),
    "selu": lambda x, a, b: F.selu(x),
    "softsign": lambda x, a, b: F.softsign(x),
}
PERIODIC = frozenset(("sin", "cos"))  # of an argument that is rounded, the large ones above all, nothing is left


# Python's operators, not torch.add and friends: sizes and other numbers pass through unharmed.
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": torch.maximum,
    "min": torch.minimum,
}


def apply_post_ops(result: Tensor, post_ops: PostOps) -> Tensor:
    """Return `result` after every entry of `post_ops`, in order; ValueError on an entry that is none of the three."""
    for name, *args in post_ops:
        if name == "eltwise":
            result = eltwise(result, *args)
        elif name == "binary":
            kind, other, *is_first = args
            result = binary(other, result, kind) if is_first else binary(result, other, kind)
        elif name == "prelu":
            result = F.prelu(result, *args)
        else:
            raise ValueError(f"unknown post-op {name!r}: expected eltwise, binary or prelu")
    return result


@op(kind=COMPUTE, light=True, shape="same", per_sample=True, torch_candidate=True)
def eltwise(src: Tensor, kind: str, alpha: float = 0.0, beta: float = 0.0) -> Tensor:
    """Return kind(src; alpha, beta) element by element; kinds in ELTWISE."""
    return ELTWISE[kind](src, alpha, beta)


@op(kind=COMPUTE, light=True, torch_candidate=True)
def binary(a: Any, b: Any, kind: str) -> Any:
    """Return kind(a, b), broadcast and promoted as eager does; either side may be a number; kinds in BINARY."""
    if is_plain(a, b):
        a, b = in_long_runs(a, b)
    return BINARY[kind](a, b)


@op(kind=COMPUTE, light=True, shape="same", per_sample=True, torch_candidate=True)
def prelu(src: Tensor, weight: Tensor) -> Tensor:
    """Return src where positive, weight * src elsewhere; weight [1] or one per channel (dimension 1)."""
    return F.prelu(src, weight)
