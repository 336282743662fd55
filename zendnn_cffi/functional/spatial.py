"""Pooling and resampling of the spatial dimensions, reduction over any dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from zendnn_cffi.functional._arrays import (
    FLOATS,
    INT8,
    channels_last_strides,
    dense_layout,
    image_strides,
)
from zendnn_cffi.functional._call import Call, first_fast
from zendnn_cffi.functional._kernel import Kernel
from zendnn_cffi.functional._operation import operation
from zendnn_cffi.primitives import checks, descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, Attr, kind_value
from zendnn_cffi.primitives.memory import MemoryDesc, plain_desc
from zendnn_cffi.primitives.primitive import PrimitiveDesc

Ints = int | Sequence[int]


@operation
def pooling(
    src: Any,
    kind: str,
    kernel: Ints,
    *,
    stride: Ints | None = None,
    padding: Ints = 0,
    padding_r: Ints | None = None,
    dilation: Ints = 1,
    ceil_mode: bool = False,
    out: Any = None,
) -> Any:
    """Return the pooled src, as torch.nn.functional.max_pool1d, 2d, 3d and avg_pool1d, 2d, 3d.

    src        [N, C, *spatial] float32, bfloat16, int8 or uint8, any strides
    kind       "max", "avg_include_padding" or "avg_exclude_padding"
    kernel, stride, padding, dilation
               one int, or one per spatial dimension; stride is kernel by default
    ceil_mode  round the output size up; the extra padding counts for no average, as in torch (kind
               "avg_include_padding" refuses it)
    Returns    [N, C, *out], dtype of src, channels_last where src is
    Raises     TypeError, ValueError for arguments that do not fit; UnsupportedError where no implementation takes them
    """
    call = Call()
    kind_value(descriptors.POOLING, kind, "kind")
    x = _images(call, src, (*FLOATS, *INT8))
    n = x.dim() - 2
    size = checks.as_dims(kernel, "kernel", rank=n, minimum=1)
    ceil_mode = checks.as_bool(ceil_mode, "ceil_mode")
    step = size if stride is None else checks.as_dims(stride, "stride", rank=n, minimum=1)
    spread = checks.as_dims(dilation, "dilation", rank=n, minimum=1)
    left = checks.as_dims(padding, "padding", rank=n)
    right = list(left if padding_r is None else checks.as_dims(padding_r, "padding_r", rank=n))
    spatial = []
    for i in range(n):
        reach = (size[i] - 1) * spread[i] + 1
        if max(left[i], right[i]) >= reach:
            raise ValueError(
                f"padding {left[i]}, {right[i]} of spatial dim {i} is as large as the window ({reach}): it must be "
                "smaller"
            )
        room = x.shape[2 + i] + left[i] + right[i] - reach
        if room < 0:
            raise ValueError(
                f"the window reaches over {reach} elements in spatial dim {i}, src with padding has {room + reach}"
            )
        count = room // step[i] + 1
        if ceil_mode and room % step[i] and count * step[i] < x.shape[2 + i] + left[i]:
            if kind == "avg_include_padding":
                raise ValueError(
                    "ceil_mode with kind 'avg_include_padding' has windows past the padding: use 'avg_exclude_padding'"
                )
            right[i] += step[i] - room % step[i]
            count += 1
        spatial.append(count)
    shape = (x.shape[0], x.shape[1], *spatial)
    result = _image_result(call, x, out, shape)
    if result.numel() == 0:
        return call.result()

    def build(layouts: dict[int, MemoryDesc], attr: Attr) -> Kernel:
        def attempt(src_md: MemoryDesc, dst_md: MemoryDesc) -> Kernel:
            op = descriptors.pooling(
                kind, src_md, dst_md, kernel=size, strides=step, dilation=spread, padding_l=left, padding_r=right
            )
            return Kernel(PrimitiveDesc(op, attr), layouts)

        return _either_layout(x, shape, attempt)

    return call.run(("pooling", kind, size, step, spread, left, tuple(right)), build)


@operation
def resampling(
    src: Any,
    kind: str,
    size: Ints | None = None,
    *,
    scale_factor: float | Sequence[float] | None = None,
    out: Any = None,
) -> Any:
    """Return src resized, as torch.nn.functional.interpolate with mode "nearest-exact" or linear, bilinear, trilinear
    (align_corners=False).

    torch's mode "nearest" picks other elements than "nearest-exact" unless every size grows by a whole factor.

    src      [N, C, *spatial] float32 or bfloat16, any strides
    kind     "nearest" or "linear"
    size     output spatial size; or scale_factor, a positive factor (or one per spatial dimension): size is floor(src
             size * factor)
    Returns  [N, C, *size], dtype of src, channels_last where src is
    Raises   TypeError, ValueError for arguments that do not fit
    """
    call = Call()
    kind_value(descriptors.RESAMPLING, kind, "kind")
    x = _images(call, src, FLOATS)
    n = x.dim() - 2
    if (size is None) == (scale_factor is None):
        raise ValueError("give either size or scale_factor")
    if size is not None:
        spatial = checks.as_dims(size, "size", rank=n, minimum=1)
    else:
        factors = checks.as_floats(scale_factor, "scale_factor", n)
        if len(factors) != n or not all(math.isfinite(f) and f > 0 for f in factors):
            raise ValueError(f"scale_factor must be {n} positive numbers, got {factors}")
        spatial = tuple(math.floor(s * f) for s, f in zip(x.shape[2:], factors, strict=False))
        if any(
            s != round(o * f) or not math.isclose(s, o * f)
            for s, o, f in zip(spatial, x.shape[2:], factors, strict=False)
        ):
            raise ValueError(
                f"scale_factor {factors} does not give whole sizes from {list(x.shape[2:])}: pass size instead"
            )
    if min(spatial) < 1:
        raise ValueError(f"the output would have spatial size {list(spatial)}")
    shape = (x.shape[0], x.shape[1], *spatial)
    result = _image_result(call, x, out, shape)
    if result.numel() == 0:
        return call.result()

    def build(layouts: dict[int, MemoryDesc], attr: Attr) -> Kernel:
        return _either_layout(
            x, shape, lambda s, d: Kernel(PrimitiveDesc(descriptors.resampling(kind, s, d), attr), layouts)
        )

    return call.run(("resampling", kind), build)


@operation
def reduction(
    src: Any,
    kind: str,
    dims: Ints | None = None,
    keepdim: bool = False,
    *,
    p: float = 2.0,
    eps: float = 0.0,
    out: Any = None,
) -> Any:
    """Return src reduced over dims.

    src      at least 1 dimension, float32 or bfloat16, any strides
    kind     "sum", "mean", "max", "min", "mul" or one of the p-norms of ``descriptors.REDUCTION``: with s the sum of
             abs(x) ** p, "norm_lp_max" is max(s, eps) ** (1 / p), "norm_lp_sum" (s + eps) ** (1 / p), and their
             "power_p" kinds leave the root out
    p, eps   of the p-norms; p at least 1
    dims     one dimension or several, negative ones count from the end; None: all
    Returns  src's shape without dims (with 1 in their place if keepdim), dtype of src
    Raises   TypeError, ValueError for arguments that do not fit
    """
    call = Call()
    kind_value(descriptors.REDUCTION, kind, "kind")
    x = call.take(src, "src", FLOATS)
    rank = x.dim()
    if rank == 0:
        raise ValueError("src must have at least one dimension")
    keepdim = checks.as_bool(keepdim, "keepdim")
    given = range(rank) if dims is None else checks.as_dims(dims, "dims", minimum=None, single=True)
    axes = tuple(checks.as_int(d, "dims", minimum=-rank, maximum=rank - 1) % rank for d in given)
    if len(set(axes)) != len(axes) or not axes:
        raise ValueError(f"dims must name at least one dimension, each once, got {dims}")
    kept = tuple(1 if i in axes else s for i, s in enumerate(x.shape))
    shown = kept if keepdim else tuple(s for i, s in enumerate(x.shape) if i not in axes)
    call.add(ARG_SRC, x)
    result = call.output(out, shown, x.dtype)
    if result.numel() == 0:
        return call.result()
    if x.numel() == 0:
        raise ValueError(f"src is empty, shape {list(x.shape)}: there is nothing to reduce")
    wide = result
    for axis in sorted(axes) if not keepdim else ():
        wide = wide.unsqueeze(axis)
    call.operands[ARG_DST] = wide
    p, eps = descriptors.reduction_numbers(kind, p, eps)
    if kept == tuple(x.shape):  # only dimensions of size 1: nothing is summed, and the library refuses it
        wide.copy_(_norm_of_one(x, kind, p, eps) if kind.startswith("norm") else x)
        return call.result()

    def build(layouts: dict[int, MemoryDesc], attr: Attr) -> Kernel:
        def attempt(src_md: MemoryDesc) -> Kernel:
            op = descriptors.reduction(kind, src_md, MemoryDesc(kept, x.dtype), p=p, eps=eps)
            return Kernel(PrimitiveDesc(op, attr), layouts)

        order = [i for i in range(rank) if i not in axes] + sorted(
            axes
        )  # the fast implementation reduces trailing dimensions
        packed = MemoryDesc([x.shape[i] for i in order], x.dtype).permute([order.index(i) for i in range(rank)])
        return first_fast([lambda: attempt(dense_layout(x)), lambda: attempt(packed)])

    return call.run(("reduction", kind, p, eps), build)


def _norm_of_one(x: torch.Tensor, kind: str, p: float, eps: float) -> torch.Tensor:
    """Return the p-norm of each element by itself, eps and power as the library has them."""
    if eps == 0 and "power" not in kind:
        return x.abs()
    power = x.float().abs() ** p
    power = power.clamp_min(eps) if kind.endswith("max") else power + eps
    return power if "power" in kind else power ** (1 / p)


def _images(call: Call, src: Any, dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    x = call.take(src, "src", dtypes)
    if not 3 <= x.dim() <= 5:
        raise ValueError(f"src must be [N, C, *spatial] with 1 to 3 spatial dimensions, got shape {list(x.shape)}")
    if 0 in x.shape[2:]:
        raise ValueError(f"src has an empty spatial dimension, {list(x.shape)}")
    call.add(ARG_SRC, x)
    return x


def _image_result(call: Call, x: torch.Tensor, out: Any, shape: Sequence[int]) -> torch.Tensor:
    return call.output(out, shape, x.dtype, strides=image_strides(x, shape))


def _either_layout(x: torch.Tensor, shape: Sequence[int], attempt: Any) -> Kernel:
    """Build for the layout src has if it is dense nchw or nhwc, with the result alike; else, or where only a reference
    takes it, for nhwc.
    """

    def inner() -> Kernel:
        return attempt(
            plain_desc(x.dtype, tuple(x.shape), channels_last_strides(x.shape)),
            plain_desc(x.dtype, tuple(shape), channels_last_strides(shape)),
        )

    def outer() -> Kernel:
        return attempt(MemoryDesc(x.shape, x.dtype), MemoryDesc(shape, x.dtype))

    return first_fast([outer, inner] if x.is_contiguous() else [inner, outer])
