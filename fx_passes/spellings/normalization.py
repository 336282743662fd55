"""Normalization and softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fx_passes import ops
from fx_passes.graph.graph import example, is_call
from fx_passes.spellings.registry import Built, Call, Parameter, is_number, row, spelled, static

aten = torch.ops.aten


def _batch_norm_module(m: Any, p: Parameter, args: tuple[Any, ...]) -> Built:
    # Without running statistics a batch normalization uses the batch's own, also in evaluation mode.
    training = m.training or m.running_mean is None
    statistics = p("running_mean"), p("running_var")
    return batch_norm(args[0], *statistics, p("weight"), p("bias"), training, m.momentum, m.eps)


@spelled(
    functions=[F.batch_norm],
    modules=dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), _batch_norm_module),
)
def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: Any = False,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> Built:
    if training is not False or running_mean is None or running_var is None or not static(eps):
        return None
    return Call(ops.batch_norm, (input, running_mean, running_var, weight, bias), {"eps": eps, "post_ops": ()})


@spelled(functions=[torch.batch_norm], overloads=[aten.batch_norm.default])
def aten_batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: Any,
    momentum: Any,
    eps: Any,
    cudnn_enabled: Any = False,
) -> Built:
    """torch.batch_norm, aten.batch_norm: another order of arguments."""
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


@spelled(first_result=[aten._native_batch_norm_legit_no_training.default])
def no_training_batch_norm(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: Any, eps: Any
) -> Built:
    return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)


@spelled(
    functions=[F.layer_norm, torch.layer_norm],
    overloads=[aten.layer_norm.default],
    first_result=[aten.native_layer_norm.default],
    modules={nn.LayerNorm: ("normalized_shape", "weight", "bias", "eps")},
)
def layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5, cudnn_enable: Any = True
) -> Built:
    if not static(normalized_shape, eps):
        return None
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    return Call(ops.layer_norm, (input, shape, weight, bias), {"eps": eps})


@spelled(
    functions=[F.group_norm, torch.group_norm],
    overloads=[aten.group_norm.default],
    modules={nn.GroupNorm: ("num_groups", "weight", "bias", "eps")},
)
def group_norm(
    input: Any, num_groups: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5, cudnn_enabled: Any = True
) -> Built:
    if not static(num_groups, eps):
        return None
    return Call(ops.group_norm, (input, num_groups, weight, bias), {"eps": eps, "post_ops": ()})


@spelled(first_result=[aten.native_group_norm.default])
def native_group_norm(input: Any, weight: Any, bias: Any, n: Any, c: Any, pixels: Any, group: Any, eps: Any) -> Built:
    """aten.native_group_norm: the sizes are those of its input."""
    return group_norm(input, group, weight, bias, eps)


@spelled(
    functions=[F.rms_norm, torch.rms_norm],
    overloads=[aten.rms_norm.default],
    modules={nn.RMSNorm: ("normalized_shape", "weight", "eps")},
    strict=["rms_norm"],
)
def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Built:
    """Over the last dimension."""
    if not static(normalized_shape, eps) or not (eps is None or is_number(eps)):
        return None
    if not isinstance(normalized_shape, int) and len(tuple(normalized_shape)) != 1:
        return None
    values = [each.meta.get("val") for each in (input, weight) if isinstance(each, fx.Node)]
    if len({value.dtype for value in values if isinstance(value, torch.Tensor)}) > 1:
        return None  # eager's result has the input's dtype
    return Call(ops.rms_norm, (input, weight), {"eps": eps})


@spelled(functions=[F.normalize])
def l2_normalize(input: Any, p: Any = 2.0, dim: Any = 1, eps: Any = 1e-12, out: Any = None) -> Built:
    """F.normalize with Euclidean norms."""
    if not isinstance(dim, int) or not is_number(eps) or not is_number(p) or p != 2 or out is not None:
        return None
    return Call(ops.l2_normalize, (input, dim), {"eps": float(eps)})


def softmax(log: bool) -> Callable[..., Built]:
    """Builder of F.softmax or F.log_softmax."""

    def build(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Built:
        if not isinstance(dim, int) or not (dtype is None or _has_dtype(input, dtype)):
            return None
        return Call(ops.softmax, (input, dim, log))

    return build


def _has_dtype(node: Any, dtype: Any) -> bool:
    """Whether node is known to be a tensor of this dtype, or this is read of it: a conversion changes nothing."""
    if is_call(dtype, getattr):
        return tuple(dtype.args) == (node, "dtype")
    value = example(node)
    return value is not None and value.dtype is dtype


def method_softmax(log: bool) -> Callable[..., Built]:
    """Builder of Tensor.softmax, torch.softmax, aten.softmax.int and their log forms."""
    return lambda input, dim, dtype=None: softmax(log)(input, dim, dtype=dtype)


def aten_softmax(log: bool) -> Callable[..., Built]:
    """Builder of aten._softmax."""
    return lambda input, dim, half_to_float: None if half_to_float else softmax(log)(input, dim)


row(softmax(False), functions=[F.softmax], modules={nn.Softmax: ("dim",)})
row(softmax(True), functions=[F.log_softmax], modules={nn.LogSoftmax: ("dim",)})
row(method_softmax(False), "softmax", "special_softmax", functions=[torch.special.softmax])
row(method_softmax(True), "log_softmax", "special_log_softmax", functions=[torch.special.log_softmax])
row(aten_softmax(False), overloads=[aten._softmax.default])
row(aten_softmax(True), overloads=[aten._log_softmax.default])
