"""Pooling and reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import ops
from fx_passes.spellings.registry import Built, Call, row, spelled, spread, static

aten = torch.ops.aten


def max_pool(n: int) -> Callable[..., Built]:
    """Builder of F.max_pool{n}d."""

    def build(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: Any = False,
        return_indices: Any = False,
    ) -> Built:
        if return_indices is not False or not static(kernel_size, stride, padding, dilation, ceil_mode):
            return None
        return _pool("max", n, input, kernel_size, stride, padding, dilation, ceil_mode)

    return build


def avg_pool(n: int) -> Callable[..., Built]:
    """Builder of F.avg_pool{n}d."""

    def build(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: Any = False,
        count_include_pad: Any = True,
        divisor_override: Any = None,
    ) -> Built:
        if divisor_override is not None or not static(kernel_size, stride, padding, ceil_mode, count_include_pad):
            return None
        kind = "avg_include_padding" if count_include_pad else "avg_exclude_padding"
        return _pool(kind, n, input, kernel_size, stride, padding, 1, ceil_mode)

    return build


def _pool(kind: str, n: int, src: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Built:
    kernel, padding = spread(kernel, n), spread(padding, n)
    stride = kernel if stride is None or stride == [] else spread(stride, n)
    if kind == "avg_include_padding" and not any(padding) and not ceil_mode:
        kind = "avg_exclude_padding"  # the same thing, and one spelling is enough
    kwargs = {
        "kernel": kernel,
        "stride": stride,
        "padding_l": padding,
        "padding_r": padding,
        "dilation": spread(dilation, n),
        "ceil_mode": ceil_mode,
    }
    return Call(ops.pool, (src, kind), kwargs)


def adaptive_pool(kind: str, n: int) -> Callable[..., Built]:
    """Builder of F.adaptive_{kind}_pool{n}d."""

    def build(input: Any, output_size: Any, return_indices: Any = False) -> Built:
        if return_indices is not False or not static(output_size) or output_size is None:
            return None
        sizes = (output_size,) if isinstance(output_size, int) else tuple(output_size)
        return Call(ops.adaptive_pool, (input, kind, sizes * n if len(sizes) == 1 else sizes))

    return build


def reduction(kind: str) -> Callable[..., Built]:
    """Builder of torch.mean and friends with the dimensions named."""

    def build(
        input: Any,
        dim: Any = None,
        keepdim: Any = False,
        *,
        dtype: Any = None,
        out: Any = None,
        axis: Any = None,
        keepdims: Any = None,
    ) -> Built:
        dim, keepdim = dim if axis is None else axis, keepdim if keepdims is None else keepdims
        if dim is None or dtype is not None or out is not None or not static(dim, keepdim):
            return None
        dims = (dim,) if isinstance(dim, int) else tuple(dim)
        return Call(ops.reduce, (input, kind, dims, keepdim)) if dims else None

    return build


@spelled("norm")
def euclidean_norm(
    input: Any, p: Any = 2, dim: Any = None, keepdim: Any = False, out: Any = None, dtype: Any = None
) -> Built:
    """Euclidean norms over dimensions that are named. Of two, the Frobenius norm is the same."""
    if p not in (2, "fro", None) or out is not None or dtype is not None or not static(dim, keepdim):
        return None
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    return Call(ops.reduce, (input, "norm", dims, keepdim)) if dims else None


@spelled(functions=[torch.linalg.vector_norm], overloads=[aten.linalg_vector_norm.default])
def vector_norm(
    x: Any, ord: Any = 2, dim: Any = None, keepdim: Any = False, *, dtype: Any = None, out: Any = None
) -> Built:
    return None if ord == "fro" else euclidean_norm(x, ord, dim, keepdim, out, dtype)


_MAX = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_AVG = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
_INDICES = ("output_size", "return_indices")
_WITH_INDICES = {2: [aten.max_pool2d_with_indices.default], 3: [aten.max_pool3d_with_indices.default]}
_PRIVATE_ADAPTIVE = {2: [aten._adaptive_avg_pool2d.default], 3: [aten._adaptive_avg_pool3d.default]}
for _n in (1, 2, 3):
    row(
        max_pool(_n),
        functions=[getattr(F, f"max_pool{_n}d"), getattr(torch, f"max_pool{_n}d")],
        overloads=[getattr(aten, f"max_pool{_n}d").default],
        first_result=_WITH_INDICES.get(_n, []),
        modules={getattr(nn, f"MaxPool{_n}d"): _MAX},
    )
    row(
        avg_pool(_n),
        functions=[getattr(F, f"avg_pool{_n}d")],
        overloads=[getattr(aten, f"avg_pool{_n}d").default],
        modules={getattr(nn, f"AvgPool{_n}d"): _AVG if _n == 1 else (*_AVG, "divisor_override")},
    )
    row(
        adaptive_pool("avg", _n),
        functions=[getattr(F, f"adaptive_avg_pool{_n}d")],
        overloads=[getattr(aten, f"adaptive_avg_pool{_n}d").default, *_PRIVATE_ADAPTIVE.get(_n, [])],
        modules={getattr(nn, f"AdaptiveAvgPool{_n}d"): ("output_size",)},
    )
    row(
        adaptive_pool("max", _n),
        functions=[getattr(F, f"adaptive_max_pool{_n}d")],
        first_result=[getattr(aten, f"adaptive_max_pool{_n}d").default],
        modules={getattr(nn, f"AdaptiveMaxPool{_n}d"): _INDICES},
    )
for _name, _kind in (("mean", "mean"), ("sum", "sum"), ("amax", "max"), ("amin", "min")):
    row(reduction(_kind), _name)
