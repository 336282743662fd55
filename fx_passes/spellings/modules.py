"""nn modules: each row gives the function a module of exactly this type is, and the arguments its attributes are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fx_passes.graph.hooks import has_hooks
from fx_passes.spellings import builders as b
from fx_passes.spellings import embedding, interpolation

Parameter = Callable[[str], Any]  # attribute name -> get_attr node (None where the module has none)
Row = Callable[[Any, Parameter, tuple[Any, ...]], b.Built]


def _conv(n: int) -> Row:
    def build(m: Any, p: Parameter, args: tuple[Any, ...]) -> b.Built:
        if m.padding_mode != "zeros":
            return None
        (src,) = args
        weight, bias = p("weight"), p("bias")
        if m.padding == "same":
            return b.same_padding(n, src, weight, bias, m.kernel_size, m.dilation, m.groups)
        return b.conv(n)(src, weight, bias, m.stride, m.padding, m.dilation, m.groups)

    return build


def _conv_transpose(n: int) -> Row:
    def build(m: Any, p: Parameter, args: tuple[Any, ...]) -> b.Built:
        if len(args) != 1:  # output_size given
            return None
        return b.conv_transpose(n)(
            args[0], p("weight"), p("bias"), m.stride, m.padding, m.output_padding, m.groups, m.dilation
        )

    return build


def _linear(m: Any, p: Parameter, args: tuple[Any, ...]) -> b.Built:
    return b.linear(args[0], p("weight"), p("bias"))


def _batch_norm(m: Any, p: Parameter, args: tuple[Any, ...]) -> b.Built:
    # Without running statistics a batch normalization uses the batch's own, also in evaluation mode.
    training = m.training or m.running_mean is None
    return b.batch_norm(
        args[0], p("running_mean"), p("running_var"), p("weight"), p("bias"), training, m.momentum, m.eps
    )


def _layer_norm(m: Any, p: Parameter, args: tuple[Any, ...]) -> b.Built:
    return b.layer_norm(args[0], m.normalized_shape, p("weight"), p("bias"), m.eps)


def _group_norm(m: Any, p: Parameter, args: tuple[Any, ...]) -> b.Built:
    return b.group_norm(args[0], m.num_groups, p("weight"), p("bias"), m.eps)


def _rms_norm(m: Any, p: Parameter, args: tuple[Any, ...]) -> b.Built:
    return b.rms_norm(args[0], m.normalized_shape, p("weight"), m.eps)


def _max_pool(n: int) -> Row:
    return lambda m, p, args: b.max_pool(n)(
        args[0], m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, m.return_indices
    )


def _avg_pool(n: int) -> Row:
    return lambda m, p, args: b.avg_pool(n)(
        args[0],
        m.kernel_size,
        m.stride,
        m.padding,
        m.ceil_mode,
        m.count_include_pad,
        getattr(m, "divisor_override", None),
    )


def _adaptive(kind: str, n: int) -> Row:
    return lambda m, p, args: b.adaptive_pool(kind, n)(args[0], m.output_size, getattr(m, "return_indices", False))


def _pad(m: Any, p: Parameter, args: tuple[Any, ...]) -> b.Built:
    return b.pad(args[0], m.padding, "constant", getattr(m, "value", 0.0))


def _call(builder: Callable[..., b.Built], *attributes: str) -> Row:
    """The module is `builder` of its input and these attributes."""
    return lambda m, p, args: builder(*args, *(getattr(m, name) for name in attributes))


def _evaluated(m: Any, p: Parameter, args: tuple[Any, ...]) -> b.Built:
    """Dropout and its kin do nothing, unless this one alone was put in training mode."""
    return None if m.training else b.identity(args[0])


MODULES: dict[type[nn.Module], Row] = {
    nn.Conv1d: _conv(1),
    nn.Conv2d: _conv(2),
    nn.Conv3d: _conv(3),
    nn.ConvTranspose1d: _conv_transpose(1),
    nn.ConvTranspose2d: _conv_transpose(2),
    nn.ConvTranspose3d: _conv_transpose(3),
    nn.Linear: _linear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: _linear,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.BatchNorm3d: _batch_norm,
    nn.SyncBatchNorm: _batch_norm,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.RMSNorm: _rms_norm,
    nn.MaxPool1d: _max_pool(1),
    nn.MaxPool2d: _max_pool(2),
    nn.MaxPool3d: _max_pool(3),
    nn.AvgPool1d: _avg_pool(1),
    nn.AvgPool2d: _avg_pool(2),
    nn.AvgPool3d: _avg_pool(3),
    nn.AdaptiveAvgPool1d: _adaptive("avg", 1),
    nn.AdaptiveAvgPool2d: _adaptive("avg", 2),
    nn.AdaptiveAvgPool3d: _adaptive("avg", 3),
    nn.AdaptiveMaxPool1d: _adaptive("max", 1),
    nn.AdaptiveMaxPool2d: _adaptive("max", 2),
    nn.AdaptiveMaxPool3d: _adaptive("max", 3),
    nn.ReLU: _call(b.unary("relu")),
    nn.ReLU6: _call(b.unary("clip", 0.0, 6.0)),
    nn.LeakyReLU: _call(b.leaky_relu, "negative_slope"),
    nn.ELU: _call(b.elu, "alpha"),
    nn.Hardtanh: _call(b.clamp, "min_val", "max_val"),
    nn.GELU: _call(b.gelu, "approximate"),
    nn.SiLU: _call(b.unary("swish", 1.0)),
    nn.Sigmoid: _call(b.unary("logistic")),
    nn.Tanh: _call(b.unary("tanh")),
    nn.Hardswish: _call(b.unary("hardswish")),
    nn.Hardsigmoid: _call(b.unary("hardsigmoid")),
    nn.Mish: _call(b.unary("mish")),
    nn.Softplus: _call(b.softplus, "beta", "threshold"),
    nn.PReLU: lambda m, p, args: b.prelu(args[0], p("weight")),
    nn.Softmax: _call(b.softmax(False), "dim"),
    nn.LogSoftmax: _call(b.softmax(True), "dim"),
    nn.Flatten: _call(b.flatten, "start_dim", "end_dim"),
    nn.Unflatten: _call(b.unflatten, "dim", "unflattened_size"),
    nn.ZeroPad1d: _pad,
    nn.ZeroPad2d: _pad,
    nn.ZeroPad3d: _pad,
    nn.ConstantPad1d: _pad,
    nn.ConstantPad2d: _pad,
    nn.ConstantPad3d: _pad,
    nn.Identity: lambda m, p, args: b.identity(args[0]),
    nn.Dropout: _evaluated,
    nn.Dropout1d: _evaluated,
    nn.Dropout2d: _evaluated,
    nn.Dropout3d: _evaluated,
    nn.AlphaDropout: _evaluated,
    nn.FeatureAlphaDropout: _evaluated,
    **interpolation.MODULES,
    **embedding.MODULES,
}


def refusal(module: nn.Module) -> str | None:
    """Return why a module of a known type must be called as it is, or None."""
    if has_hooks(module):
        return "it has hooks"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    for name, parameter in module._parameters.items():
        if parameter is not None and type(parameter) is not nn.Parameter:
            return f"{name} is a {type(parameter).__name__}"
    if isinstance(getattr(module, "weight", None), torch.Tensor) and "weight" not in module._parameters:
        return "its weight is computed on each call"
    return None
