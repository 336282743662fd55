"""Convolutions and transposed convolutions of one to three dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fx_passes import ops
from fx_passes.graph.graph import tensor_of
from fx_passes.spellings.registry import Built, Call, ModuleBuilder, Parameter, row, spelled, spread, static

aten = torch.ops.aten


def conv(n: int) -> Callable[..., Built]:
    """Builder of F.conv{n}d."""

    def build(
        input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: Any = 1
    ) -> Built:
        if not static(stride, padding, dilation, groups):
            return None
        stride, dilation = spread(stride, n), spread(dilation, n)
        if isinstance(padding, str):
            if padding == "same":
                kernel = _kernel_size(weight, n)
                if kernel is None or any(step != 1 for step in stride):  # PyTorch refuses other strides
                    return None
                return same_padding(n, input, weight, bias, kernel, dilation, groups)
            if padding != "valid":
                return None
            padding = 0
        pads = spread(padding, n)
        return _convolution(input, weight, bias, stride, pads, pads, dilation, groups)

    return build


def _convolution(
    src: Any, weight: Any, bias: Any, stride: Any, padding_l: Any, padding_r: Any, dilation: Any, groups: int
) -> Call:
    return Call(
        ops.convolution,
        (src, weight, bias),
        {
            "stride": stride,
            "padding_l": padding_l,
            "padding_r": padding_r,
            "dilation": dilation,
            "groups": groups,
            "post_ops": (),
        },
    )


def _kernel_size(weight: Any, n: int) -> tuple[int, ...] | None:
    """The sizes that padding="same" depends on; None where they are not known before the call."""
    value = weight.meta.get("val") if isinstance(weight, fx.Node) else None
    if value is None and isinstance(weight, fx.Node) and weight.graph.owning_module is not None:
        value = tensor_of(weight.graph.owning_module, weight)
    sizes = tuple(value.shape[-n:]) if isinstance(value, torch.Tensor) else ()
    return sizes if sizes and static(sizes) and all(type(size) is int for size in sizes) else None


def same_padding(
    n: int, input: Any, weight: Any, bias: Any, kernel: Sequence[int], dilation: Any, groups: int
) -> Built:
    """Convolution with padding="same" (stride 1), whose kernel size is known; the odd one goes to the right."""
    dilation = spread(dilation, n)
    total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    left = tuple(t // 2 for t in total)
    right = tuple(t - t // 2 for t in total)
    return _convolution(input, weight, bias, (1,) * n, left, right, dilation, groups)


def conv_transpose(n: int) -> Callable[..., Built]:
    """Builder of F.conv_transpose{n}d."""

    def build(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: Any = 1,
        dilation: Any = 1,
    ) -> Built:
        if not static(stride, padding, output_padding, groups, dilation):
            return None
        kwargs = {
            "stride": spread(stride, n),
            "padding": spread(padding, n),
            "output_padding": spread(output_padding, n),
            "dilation": spread(dilation, n),
            "groups": groups,
            "post_ops": (),
        }
        return Call(ops.deconvolution, (input, weight, bias), kwargs)

    return build


@spelled(functions=[torch.convolution], overloads=[aten.convolution.default])
def aten_convolution(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Built:
    """aten.convolution."""
    if not static(stride, padding, dilation, output_padding):
        return None
    n = max(len(stride), len(padding), len(dilation))
    if transposed:
        return conv_transpose(n)(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(n)(input, weight, bias, stride, padding, dilation, groups)


def _conv_module(n: int) -> ModuleBuilder:
    def build(m: Any, p: Parameter, args: tuple[Any, ...]) -> Built:
        if m.padding_mode != "zeros":
            return None
        (src,) = args
        weight, bias = p("weight"), p("bias")
        if m.padding == "same":
            return same_padding(n, src, weight, bias, m.kernel_size, m.dilation, m.groups)
        return conv(n)(src, weight, bias, m.stride, m.padding, m.dilation, m.groups)

    return build


def _conv_transpose_module(n: int) -> ModuleBuilder:
    def build(m: Any, p: Parameter, args: tuple[Any, ...]) -> Built:
        if len(args) != 1:  # output_size given
            return None
        weight, bias = p("weight"), p("bias")
        return conv_transpose(n)(args[0], weight, bias, m.stride, m.padding, m.output_padding, m.groups, m.dilation)

    return build


for _n, _layer, _transposed_layer in (
    (1, nn.Conv1d, nn.ConvTranspose1d),
    (2, nn.Conv2d, nn.ConvTranspose2d),
    (3, nn.Conv3d, nn.ConvTranspose3d),
):
    _name, _transposed = f"conv{_n}d", f"conv_transpose{_n}d"
    row(
        conv(_n),
        functions=[getattr(F, _name), getattr(torch, _name)],
        overloads=[getattr(getattr(aten, _name), overload) for overload in ("default", "padding")],
        modules={_layer: _conv_module(_n)},
    )
    row(
        conv_transpose(_n),
        functions=[getattr(F, _transposed), getattr(torch, _transposed)],
        overloads=[getattr(getattr(aten, _transposed), getattr(aten, _transposed).overloads()[0])],
        modules={_transposed_layer: _conv_transpose_module(_n)},
    )
