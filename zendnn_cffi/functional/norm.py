"""Batch, layer and local response normalization, channel shuffle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zendnn_cffi.functional._arrays import FLOATS, INT8, dense_layout
from zendnn_cffi.functional._call import Call, first_fast
from zendnn_cffi.functional._kernel import Kernel
from zendnn_cffi.functional._operation import operation
from zendnn_cffi.primitives import checks, descriptors
from zendnn_cffi.primitives.attributes import (
    ARG_DST,
    ARG_MEAN,
    ARG_SCALE,
    ARG_SHIFT,
    ARG_SRC,
    ARG_VARIANCE,
    Attr,
    kind_value,
)
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc


@operation
def batch_norm(
    src: Any,
    mean: Any,
    variance: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    relu: bool = False,
    out: Any = None,
) -> Any:
    """Return (src - mean) / sqrt(variance + eps) * weight + bias per channel, as torch.nn.functional.batch_norm in
    evaluation.

    src      [N, C, ...] (2 to 5 dimensions) float32 or bfloat16, any strides
    mean, variance, weight, bias   [C] float32; weight and bias may be None
    relu     set negative results to zero in the same pass
    out      may be src itself
    Returns  shape and dtype of src
    Raises   TypeError, ValueError for arguments that do not fit
    """
    call = Call()
    x = call.take(src, "src", FLOATS)
    if not 2 <= x.dim() <= 5:
        raise ValueError(f"src must have 2 to 5 dimensions, got shape {list(x.shape)}")
    eps, relu = _epsilon(eps), checks.as_bool(relu, "relu")
    for arg, value, name in (
        (ARG_MEAN, mean, "mean"),
        (ARG_VARIANCE, variance, "variance"),
        (ARG_SCALE, weight, "weight"),
        (ARG_SHIFT, bias, "bias"),
    ):
        if value is None and arg in (ARG_SCALE, ARG_SHIFT):
            continue
        _per_channel(call, arg, value, name, x.shape[1])
    wide = x if x.dim() > 2 else x.unsqueeze(-1)  # there is no two-dimensional fast implementation
    call.add(ARG_SRC, wide)
    result = call.output(out, x.shape, x.dtype, like=x, in_place="src")
    if result.numel() == 0:
        return call.result()
    if x.dim() == 2:
        call.operands[ARG_DST] = result.unsqueeze(-1)

    def build(layouts: dict[int, MemoryDesc], attr: Attr) -> Kernel:
        def attempt(desc: MemoryDesc) -> Kernel:
            op = descriptors.batch_normalization(desc, eps, scale=weight is not None, shift=bias is not None, relu=relu)
            return Kernel(PrimitiveDesc(op, attr), layouts)

        return first_fast([lambda: attempt(dense_layout(wide)), lambda: attempt(MemoryDesc(wide.shape, x.dtype))])

    return call.run(("batch_norm", eps, weight is not None, bias is not None, relu), build)


@operation
def layer_norm(
    src: Any,
    normalized_shape: int | Sequence[int],
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    out: Any = None,
) -> Any:
    """Return src normalized over its last dimensions, as torch.nn.functional.layer_norm.

    src               at least 1 dimension, float32 or bfloat16, any strides
    normalized_shape  the last dimensions of src
    weight, bias      float32 of normalized_shape, or None
    out               may be src itself
    Returns           shape and dtype of src
    Raises            TypeError, ValueError for arguments that do not fit
    """
    call = Call()
    x = call.take(src, "src", FLOATS)
    last = checks.as_dims(normalized_shape, "normalized_shape", single=True)
    if not last or tuple(x.shape[x.dim() - len(last) :]) != last or len(last) > x.dim():
        raise ValueError(
            f"normalized_shape {list(last)} must be the last dimensions of src, which has shape {list(x.shape)}"
        )
    eps = _epsilon(eps)
    length = 1
    for size in last:
        length *= size
    for arg, value, name in ((ARG_SCALE, weight, "weight"), (ARG_SHIFT, bias, "bias")):
        if value is not None:
            tensor = call.take_dense(value, name, (torch.float32,))
            if tuple(tensor.shape) != last:
                raise ValueError(f"{name} must have shape {list(last)}, got {list(tensor.shape)}")
            call.add(arg, tensor.reshape(length))
    call.add(ARG_SRC, x)
    result = call.output(out, x.shape, x.dtype, in_place="src")
    if result.numel() == 0:
        return call.result()
    if not result.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {list(result.stride())}")
    rows = x.numel() // length
    call.operands[ARG_SRC], call.operands[ARG_DST] = x.reshape(rows, length), result.view(rows, length)

    def build(layouts: dict[int, MemoryDesc], attr: Attr) -> Kernel:
        op = descriptors.layer_normalization(
            MemoryDesc((rows, length), x.dtype), eps, scale=weight is not None, shift=bias is not None
        )
        return Kernel(PrimitiveDesc(op, attr), layouts)

    return call.run(("layer_norm", eps, weight is not None, bias is not None), build)


@operation
def lrn(
    src: Any,
    size: int,
    *,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 1.0,
    kind: str = "across_channels",
    out: Any = None,
) -> Any:
    """Return local response normalization, as torch.nn.functional.local_response_norm (kind "across_channels").

    src      [N, C, ...] (3 to 5 dimensions) float32 or bfloat16, any strides; size is odd
    Returns  shape and dtype of src
    Raises   TypeError, ValueError for arguments that do not fit
    """
    call = Call()
    kind_value(descriptors.LRN, kind, "kind")
    x = call.take(src, "src", FLOATS)
    if not 3 <= x.dim() <= 5:
        raise ValueError(f"src must have 3 to 5 dimensions, got shape {list(x.shape)}")
    size = checks.as_int(size, "size", minimum=1, maximum=2**20)
    if size % 2 == 0:
        raise ValueError(f"size must be odd, got {size}: the library centres the window")
    alpha, beta, k = checks.as_float(alpha, "alpha"), checks.as_float(beta, "beta"), checks.as_float(k, "k")
    call.add(ARG_SRC, x)
    result = call.output(out, x.shape, x.dtype, like=x)
    if result.numel() == 0:
        return call.result()

    def build(layouts: dict[int, MemoryDesc], attr: Attr) -> Kernel:
        op = descriptors.lrn(kind, dense_layout(x), local_size=size, alpha=alpha, beta=beta, k=k)
        return Kernel(PrimitiveDesc(op, attr), layouts)

    return call.run(("lrn", kind, size, alpha, beta, k), build)


@operation
def shuffle(src: Any, groups: int, dim: int = 1, *, out: Any = None) -> Any:
    """Return src with the channels of ``groups`` groups interleaved, as torch.nn.functional.channel_shuffle.

    src      any shape with at least 1 dimension, float32, bfloat16, int8 or uint8, any strides; groups divides
             dimension dim
    Returns  shape and dtype of src
    Raises   TypeError, ValueError for arguments that do not fit
    """
    call = Call()
    x = call.take(src, "src", (*FLOATS, *INT8))
    axis = checks.as_int(dim, "dim", minimum=-x.dim(), maximum=x.dim() - 1) % max(x.dim(), 1)
    groups = checks.as_int(groups, "groups", minimum=1)
    if x.shape[axis] % groups:
        raise ValueError(f"groups {groups} must divide dimension {axis} of src, which is {x.shape[axis]}")
    call.add(ARG_SRC, x)
    result = call.output(out, x.shape, x.dtype, like=x)
    if result.numel() == 0:
        return call.result()

    def build(layouts: dict[int, MemoryDesc], attr: Attr) -> Kernel:
        return Kernel(PrimitiveDesc(descriptors.shuffle(dense_layout(x), axis, groups), attr), layouts)

    return call.run(("shuffle", axis, groups), build)


def _epsilon(eps: Any) -> float:
    eps = checks.as_float(eps, "eps")
    if not 0 <= eps < 1e30:
        raise ValueError(f"eps must be a small non-negative number, got {eps}")
    return eps


def _per_channel(call: Call, arg: int, value: Any, name: str, channels: int) -> None:
    tensor = call.take_dense(value, name, (torch.float32,))
    if tuple(tensor.shape) != (channels,):
        raise ValueError(f"{name} must have shape [{channels}], one value per channel, got {list(tensor.shape)}")
    call.add(arg, tensor)
