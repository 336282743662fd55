"""Element-wise operations."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from fx_passes import ops
from fx_passes.spellings.registry import Built, Call, is_number, row, spelled, static

aten = torch.ops.aten
_SELU = (1.6732632423543772, 1.0507009873554805)  # alpha and scale


def unary(kind: str, alpha: float = 0.0, beta: float = 0.0) -> Callable[..., Built]:
    """Builder of a function without parameters; inplace is settled before builders run."""
    return lambda input, inplace=False, *, out=None: (
        None if out is not None else Call(ops.eltwise, (input, kind, alpha, beta))
    )


row(unary("relu"), "relu", modules={nn.ReLU: ()})
row(unary("hardtanh", 0.0, 6.0), "relu6", modules={nn.ReLU6: ()})
row(unary("logistic"), "sigmoid", "special_expit", functions=[torch.special.expit], modules={nn.Sigmoid: ()})
row(unary("tanh"), "tanh", modules={nn.Tanh: ()})
row(unary("swish", 1.0), "silu", modules={nn.SiLU: ()})
row(unary("hardswish"), "hardswish", modules={nn.Hardswish: ()})
row(unary("hardsigmoid"), "hardsigmoid", modules={nn.Hardsigmoid: ()})
row(unary("mish"), "mish", modules={nn.Mish: ()})
row(unary("selu"), "selu", modules={nn.SELU: ()})
row(unary("softsign"), "softsign", modules={nn.Softsign: ()})
for _kind in ("exp", "log", "sqrt", "rsqrt", "square", "abs", "round", "sin", "cos", "reciprocal"):
    row(unary(_kind), _kind)
for _kind in ("erf", "expm1", "log1p"):
    row(unary(_kind), _kind, f"special_{_kind}", functions=[getattr(torch.special, _kind)])
row(unary("abs"), "absolute")


@spelled("leaky_relu", modules={nn.LeakyReLU: ("negative_slope",)})
def leaky_relu(input: Any, negative_slope: Any = 0.01, inplace: bool = False) -> Built:
    if not is_number(negative_slope) or negative_slope == 0:
        return None  # 0 times infinity is no number, which relu makes 0
    return Call(ops.eltwise, (input, "relu", negative_slope, 0.0))


@spelled("elu", modules={nn.ELU: ("alpha",)})
def elu(input: Any, alpha: Any = 1.0, inplace: bool = False) -> Built:
    return Call(ops.eltwise, (input, "elu", alpha, 0.0)) if is_number(alpha) else None


@spelled(overloads=[aten.elu.default, aten.elu_.default])
def scaled_elu(input: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Built:
    """aten's elu, which decomposes SELU and CELU: with SELU's numbers, or with alpha alone."""
    if not all(map(is_number, (alpha, scale, input_scale))) or input_scale != 1:
        return None
    if (alpha, scale) == _SELU:
        return Call(ops.eltwise, (input, "selu", 0.0, 0.0))
    return elu(input, alpha) if scale == 1 else None


@spelled("hardtanh", modules={nn.Hardtanh: ("min_val", "max_val")})
def hardtanh(input: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False) -> Built:
    if not is_number(min_val) or not is_number(max_val) or min_val > max_val:
        return None
    return Call(ops.eltwise, (input, "hardtanh", min_val, max_val))


@spelled("clamp", "clip")
def clamp(input: Any, min: Any = None, max: Any = None) -> Built:
    """Limits that are numbers in order (of min > max eager makes max everywhere; clip need not), or 0 and none."""
    if max is None and is_number(min) and min == 0:
        return Call(ops.eltwise, (input, "clamp_min", min, 0.0))
    if not is_number(min) or not is_number(max) or min > max:
        return None
    return Call(ops.eltwise, (input, "clip", min, max))


@spelled("gelu", modules={nn.GELU: ("approximate",)})
def gelu(input: Any, approximate: str = "none") -> Built:
    kind = {"none": "gelu_erf", "tanh": "gelu_tanh"}.get(approximate)
    return Call(ops.eltwise, (input, kind, 0.0, 0.0)) if kind else None


@spelled("softplus", modules={nn.Softplus: ("beta", "threshold")})
def softplus(input: Any, beta: Any = 1, threshold: Any = 20) -> Built:
    return Call(ops.eltwise, (input, "soft_relu", 0.0, 0.0)) if (beta, threshold) == (1, 20) else None


@spelled("pow", functions=[operator.pow])
def power(input: Any, exponent: Any, *, out: Any = None) -> Built:
    if out is not None or not is_number(exponent):
        return None
    kind = {2: "square", 0.5: "sqrt"}.get(exponent)
    if kind is None:
        return Call(ops.eltwise, (input, "pow", 1.0, exponent))
    of_integers = 2.0 if kind == "square" and isinstance(exponent, float) else 0.0  # then they become floating-point
    return Call(ops.eltwise, (input, kind, 0.0, of_integers))


@spelled("neg", "negative", functions=[operator.neg])
def negative(input: Any, *, out: Any = None) -> Built:
    return None if out is not None else Call(ops.binary, (input, -1, "mul"))


@spelled("prelu", modules={nn.PReLU: ("weight",)})
def prelu(input: Any, weight: Any) -> Built:
    return Call(ops.prelu, (input, weight)) if isinstance(weight, fx.Node) else None


def binary(kind: str) -> Callable[..., Built]:
    """Builder of torch.add and friends, alpha 1 only."""

    def build(input: Any, other: Any, *, alpha: Any = 1, rounding_mode: Any = None, out: Any = None) -> Built:
        if not is_number(alpha) or alpha != 1 or rounding_mode is not None or out is not None:
            return None
        if not all(isinstance(side, fx.Node) or is_number(side) for side in (input, other)):
            return None
        if kind in ("max", "min") and not (isinstance(input, fx.Node) and isinstance(other, fx.Node)):
            return None
        return Call(ops.binary, (input, other, kind))

    return build


@spelled("addcmul")
def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1, out: Any = None) -> Built:
    """The sum with a product, which no number multiplies."""
    if out is not None or value != 1 or not all(isinstance(each, fx.Node) for each in (input, tensor1, tensor2)):
        return None
    return Call(ops.binary, (input, Call(ops.binary, (tensor1, tensor2, "mul")), "add"))


def reversed_binary(kind: str) -> Callable[..., Built]:
    """Builder of Tensor.__radd__ and friends, torch.rsub."""
    return lambda input, other, *, alpha=1: binary(kind)(other, input, alpha=alpha)


row(binary("add"), "add", functions=[operator.add])
row(binary("sub"), "sub", "subtract", functions=[operator.sub])
row(binary("mul"), "mul", "multiply", functions=[operator.mul])
row(binary("div"), "div", "divide", "true_divide", functions=[operator.truediv])
row(binary("max"), "maximum")
row(binary("min"), "minimum")
row(reversed_binary("sub"), "rsub")


@spelled("glu", modules={nn.GLU: ("dim",)}, strict=["glu"])
def glu(input: Any, dim: Any = -1) -> Built:
    """The first half along a dimension, times the sigmoid of the second."""
    if not static(dim):
        return None
    halves = Call(ops.chunk, (input, 2, dim))
    first, second = (Call(operator.getitem, (halves, index)) for index in range(2))
    return Call(ops.binary, (first, Call(ops.eltwise, (second, "logistic", 0.0, 0.0)), "mul"))
