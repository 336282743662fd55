"""Overloads of aten operators, as torch.export and Dynamo leave them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.spellings import builders as b
from fx_passes.spellings import embedding
from fx_passes.spellings.tables import NAMED

Builder = Callable[..., b.Built]
aten = torch.ops.aten


def softmax(log: bool) -> Builder:
    """Builder of aten._softmax."""
    return lambda input, dim, half_to_float: None if half_to_float else b.softmax(log)(input, dim)


def slice_(input: Any, dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1) -> b.Built:
    if step != 1 or not b.static(dim, start, end):
        return None
    return b.Call(ops.narrow, (input, dim, start, end))


def select(input: Any, dim: Any, index: Any) -> b.Built:
    """One index along a dimension: x[:, :, 3]."""
    if not b.static(dim, index) or dim < 0:
        return None
    return b.Call(ops.index, (input, (*(slice(None),) * dim, index)))


def no_training_batch_norm(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: Any, eps: Any
) -> b.Built:
    return b.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)


def native_layer_norm(input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: Any) -> b.Built:
    return b.layer_norm(input, normalized_shape, weight, bias, eps)


def dropout(input: Any, p: Any, train: Any) -> b.Built:
    return b.dropout(input, p, train)


def contiguous(input: Any, *, memory_format: Any = None) -> b.Built:
    return b.contiguous(input) if memory_format in (None, torch.contiguous_format) else None


def transposed(input: Any) -> b.Built:
    """t() of a matrix; what has fewer dimensions stays as it is."""
    value = input.meta.get("val") if isinstance(input, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    return b.transpose(input, 0, 1) if value.dim() == 2 else b.identity(input)


# Operators named as the function in spellings.NAMED take its arguments; these are the others.
OVERLOADS: dict[Any, Builder] = {
    aten.convolution.default: b.aten_convolution,
    aten.linear.default: b.linear,
    aten.addmm.default: b.addmm,
    aten.batch_norm.default: b.aten_batch_norm,
    aten._softmax.default: softmax(False),
    aten._log_softmax.default: softmax(True),
    aten.layer_norm.default: b.layer_norm,
    aten.group_norm.default: b.group_norm,
    aten.rms_norm.default: b.rms_norm,
    aten.cat.default: b.concat,
    aten.view.default: b.reshape,
    aten._unsafe_view.default: b.reshape,
    aten.expand.default: lambda input, size, *, implicit=False: b.expand(input, size),
    aten.slice.Tensor: slice_,
    aten.select.int: select,
    aten.t.default: transposed,
    aten.split.Tensor: b.split,
    aten.split_with_sizes.default: b.split,
    aten.sym_size.int: b.size,
    aten.dropout.default: dropout,
    aten.contiguous.default: contiguous,
    aten.pad.default: b.pad,
    aten.baddbmm.default: b.baddbmm,
    aten.einsum.default: lambda equation, tensors, *, path=None: b.einsum(equation, tensors),
    aten.constant_pad_nd.default: lambda input, pad, value=0: b.pad(input, pad, "constant", value),
    aten.scaled_dot_product_attention.default: b.attention,
    aten._adaptive_avg_pool2d.default: b.adaptive_pool("avg", 2),
    aten._adaptive_avg_pool3d.default: b.adaptive_pool("avg", 3),
}
for _n in (1, 2, 3):
    for _overload in ("default", "padding"):
        OVERLOADS[getattr(getattr(aten, f"conv{_n}d"), _overload)] = b.conv(_n)
    OVERLOADS[getattr(aten, f"max_pool{_n}d").default] = b.max_pool(_n)
    OVERLOADS[getattr(aten, f"avg_pool{_n}d").default] = b.avg_pool(_n)
    OVERLOADS[getattr(aten, f"adaptive_avg_pool{_n}d").default] = b.adaptive_pool("avg", _n)
for _name, _n in (("conv_transpose1d", 1), ("conv_transpose2d", 2), ("conv_transpose3d", 3)):
    _packet = getattr(aten, _name)
    OVERLOADS[getattr(_packet, _packet.overloads()[0])] = b.conv_transpose(_n)

# Operators with several results, of which the first is the value.
FIRST_RESULT: dict[Any, Builder] = {
    aten._native_batch_norm_legit_no_training.default: no_training_batch_norm,
    aten.native_layer_norm.default: native_layer_norm,
    aten.native_group_norm.default: b.native_group_norm,
    aten.max_pool2d_with_indices.default: b.max_pool(2),
    aten.max_pool3d_with_indices.default: b.max_pool(3),
    **{getattr(aten, f"adaptive_max_pool{n}d").default: b.adaptive_pool("max", n) for n in (1, 2, 3)},
    **embedding.FIRST_RESULT,
}


def overload_builder(target: Any) -> Builder | None:
    """The builder of an aten overload, in-place ones included; None if there is none."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    return OVERLOADS.get(target) or NAMED.get(target._opname.rstrip("_"))
