"""Normalization and softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fx_passes import ops
from fx_passes.spellings.builders.base import Built, Call, is_number, static


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


def layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5, cudnn_enable: Any = True
) -> Built:
    if not static(normalized_shape, eps):
        return None
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    return Call(ops.layer_norm, (input, shape, weight, bias), {"eps": eps})


def group_norm(
    input: Any, num_groups: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5, cudnn_enabled: Any = True
) -> Built:
    if not static(num_groups, eps):
        return None
    return Call(ops.group_norm, (input, num_groups, weight, bias), {"eps": eps, "post_ops": ()})


def native_group_norm(input: Any, weight: Any, bias: Any, n: Any, c: Any, pixels: Any, group: Any, eps: Any) -> Built:
    """aten.native_group_norm: the sizes are those of its input."""
    return group_norm(input, group, weight, bias, eps)


def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Built:
    """Over the last dimension."""
    if not static(normalized_shape, eps) or not (eps is None or is_number(eps)):
        return None
    if not isinstance(normalized_shape, int) and len(tuple(normalized_shape)) != 1:
        return None
    return Call(ops.rms_norm, (input, weight), {"eps": eps})


def l2_normalize(input: Any, p: Any = 2.0, dim: Any = 1, eps: Any = 1e-12, out: Any = None) -> Built:
    """F.normalize with Euclidean norms."""
    if not isinstance(dim, int) or not is_number(eps) or not is_number(p) or p != 2 or out is not None:
        return None
    return Call(ops.l2_normalize, (input, dim), {"eps": float(eps)})


def softmax(log: bool) -> Callable[..., Built]:
    """Builder of F.softmax or F.log_softmax."""

    def build(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Built:
        if not isinstance(dim, int) or dtype is not None:
            return None
        return Call(ops.softmax, (input, dim, log))

    return build


def method_softmax(log: bool) -> Callable[..., Built]:
    """Builder of Tensor.softmax, torch.softmax, aten.softmax.int and their log forms."""
    return lambda input, dim, dtype=None: softmax(log)(input, dim, dtype=dtype)
