"""The tables: which function, method or overload is which operation. Plain data; a new spelling is a new row."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fx_passes.spellings import builders as b
from fx_passes.spellings import embedding
from fx_passes.spellings.interpolation import interpolate

Builder = Callable[..., b.Built]

# Element-wise functions without parameters: name of the function (torch.*, F.*, aten.*, method) -> kind
UNARY = {
    "relu": b.unary("relu"),
    "relu6": b.unary("clip", 0.0, 6.0),
    "sigmoid": b.unary("logistic"),
    "tanh": b.unary("tanh"),
    "silu": b.unary("swish", 1.0),
    "hardswish": b.unary("hardswish"),
    "hardsigmoid": b.unary("hardsigmoid"),
    "mish": b.unary("mish"),
    "exp": b.unary("exp"),
    "log": b.unary("log"),
    "sqrt": b.unary("sqrt"),
    "rsqrt": b.unary("rsqrt"),
    "square": b.unary("square"),
    "abs": b.unary("abs"),
    "round": b.unary("round"),
}

# The same name means the same signature as a function of torch or F, as a method of Tensor, and (below) as an aten op.
NAMED: dict[str, Builder] = {
    **UNARY,
    "leaky_relu": b.leaky_relu,
    "elu": b.elu,
    "hardtanh": b.hardtanh,
    "clamp": b.clamp,
    "clip": b.clamp,
    "gelu": b.gelu,
    "softplus": b.softplus,
    "pow": b.power,
    "neg": b.negative,
    "prelu": b.prelu,
    "add": b.binary("add"),
    "sub": b.binary("sub"),
    "subtract": b.binary("sub"),
    "mul": b.binary("mul"),
    "multiply": b.binary("mul"),
    "div": b.binary("div"),
    "divide": b.binary("div"),
    "true_divide": b.binary("div"),
    "maximum": b.binary("max"),
    "minimum": b.binary("min"),
    "rsub": b.reversed_binary("sub"),
    "matmul": b.matmul,
    "bmm": b.matmul,
    "mm": b.matmul,
    "softmax": b.method_softmax(False),
    "log_softmax": b.method_softmax(True),
    "mean": b.reduction("mean"),
    "sum": b.reduction("sum"),
    "amax": b.reduction("max"),
    "amin": b.reduction("min"),
    "flatten": b.flatten,
    "unflatten": b.unflatten,
    "reshape": b.reshape,
    "reshape_as": b.reshape_as,
    "view_as": b.reshape_as,
    "permute": b.permute,
    "transpose": b.transpose,
    "swapaxes": b.transpose,
    "swapdims": b.transpose,
    "chunk": b.chunk,
    "unsqueeze": b.unsqueeze,
    "squeeze": b.squeeze,
}

METHODS: dict[str, Builder] = {
    **{name: builder for name, builder in NAMED.items() if hasattr(torch.Tensor, name)},
    "view": b.reshape,
    "split": b.method_split,
    "expand": b.expand,
    "contiguous": b.contiguous,
    "size": b.size,
    "dim": b.rank,
    "ndimension": b.rank,
}

FUNCTIONS: dict[Any, Builder] = {
    **{getattr(torch, name): builder for name, builder in NAMED.items() if hasattr(torch, name)},
    **{getattr(F, name): builder for name, builder in NAMED.items() if hasattr(F, name)},
    F.softmax: b.softmax(False),
    F.log_softmax: b.softmax(True),
    F.linear: b.linear,
    F.batch_norm: b.batch_norm,
    torch.batch_norm: b.aten_batch_norm,
    F.layer_norm: b.layer_norm,
    F.group_norm: b.group_norm,
    torch.group_norm: b.group_norm,
    F.rms_norm: b.rms_norm,
    F.normalize: b.l2_normalize,
    torch.rms_norm: b.rms_norm,
    torch.baddbmm: b.baddbmm,
    torch.addmm: b.addmm,
    torch.layer_norm: b.layer_norm,
    torch.cat: b.concat,
    torch.concat: b.concat,
    torch.concatenate: b.concat,
    torch.split: b.split,
    F.dropout: b.dropout,
    F.dropout1d: b.dropout,
    F.dropout2d: b.dropout,
    F.dropout3d: b.dropout,
    F.alpha_dropout: b.dropout,
    F.feature_alpha_dropout: b.dropout,
    torch.convolution: b.aten_convolution,
    torch.einsum: b.einsum,
    F.scaled_dot_product_attention: b.attention,
    operator.getitem: b.index,
    F.pad: b.pad,
    torch._C._nn.pad: b.pad,  # as TorchDynamo leaves it
    F.interpolate: interpolate,
    **embedding.FUNCTIONS,
    operator.add: b.binary("add"),
    operator.sub: b.binary("sub"),
    operator.mul: b.binary("mul"),
    operator.truediv: b.binary("div"),
    operator.matmul: b.matmul,
    operator.pow: b.power,
    operator.neg: b.negative,
}
for _n in (1, 2, 3):
    FUNCTIONS[getattr(F, f"conv{_n}d")] = b.conv(_n)
    FUNCTIONS[getattr(torch, f"conv{_n}d")] = b.conv(_n)
    FUNCTIONS[getattr(F, f"conv_transpose{_n}d")] = b.conv_transpose(_n)
    FUNCTIONS[getattr(torch, f"conv_transpose{_n}d")] = b.conv_transpose(_n)
    FUNCTIONS[getattr(F, f"max_pool{_n}d")] = b.max_pool(_n)
    FUNCTIONS[getattr(torch, f"max_pool{_n}d")] = b.max_pool(_n)
    FUNCTIONS[getattr(F, f"avg_pool{_n}d")] = b.avg_pool(_n)
    FUNCTIONS[getattr(F, f"adaptive_avg_pool{_n}d")] = b.adaptive_pool("avg", _n)
    FUNCTIONS[getattr(F, f"adaptive_max_pool{_n}d")] = b.adaptive_pool("max", _n)

# In-place spellings become the function of the same meaning, once normalize has shown that nobody can tell.
INPLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    **{
        getattr(torch, name + "_"): getattr(torch, name)
        for name in NAMED
        if hasattr(torch, name + "_") and hasattr(torch, name)
    },
    **{getattr(F, name + "_"): getattr(F, name) for name in NAMED if hasattr(F, name + "_") and hasattr(F, name)},
}

# By name, so that libraries that are not installed or not imported cost nothing.
QUALIFIED: dict[str, Builder] = {
    "torchvision.ops.stochastic_depth.stochastic_depth": b.stochastic_depth,
}
