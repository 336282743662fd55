"""Operations that gather elements: pooling, reduction, resampling, embedding_bag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zendnn_cffi.errors import check
from zendnn_cffi.primitives import checks
from zendnn_cffi.primitives.attributes import kind_value
from zendnn_cffi.primitives.descriptors.common import (
    EMBEDDING_BAG,
    INFERENCE,
    POOLING,
    REDUCTION,
    RESAMPLING,
    OpDesc,
    accumulator,
    describing,
    fill,
    need,
    need_broadcastable,
    need_equal,
    need_layout,
    need_rank,
    need_written,
    window_of,
    window_output,
)
from zendnn_cffi.primitives.handles import native
from zendnn_cffi.primitives.memory import MemoryDesc, pad

_MOST_RESAMPLED = 2**24  # along a dimension


@describing
def pooling(
    kind: str,
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    kernel: Sequence[int] | int,
    strides: Sequence[int] | int = 1,
    dilation: Sequence[int] | int = 1,
    padding_l: Sequence[int] | int = 0,
    padding_r: Sequence[int] | int | None = None,
) -> OpDesc:
    """Pooling over 1 to 3 spatial dimensions; kind "max", "avg_include_padding" or "avg_exclude_padding"; dilation 1 is
    dense.
    """
    need(src=src, dst=dst)
    need_written(dst, "dst")
    need_layout(src, "src")
    spatial = src.ndim - 2
    if not 1 <= spatial <= 3:
        raise ValueError(f"src must be [N, C, *spatial] with 1 to 3 spatial dimensions, got {src}")
    need_rank(dst, src.ndim, "dst")
    alg = kind_value(POOLING, kind, "kind")
    kernel = checks.as_dims(kernel, "kernel", rank=spatial, minimum=1)
    strides, dilation, padding_l, padding_r = window_of(spatial, strides, dilation, padding_l, padding_r)
    need_equal(dst.dims[:2], src.dims[:2], "dst [N, C] against src's")
    for i in range(spatial):
        reach = (kernel[i] - 1) * dilation[i] + 1
        if padding_l[i] >= reach or padding_r[i] >= reach:
            raise ValueError(
                f"padding of spatial dim {i} is {padding_l[i]}, {padding_r[i]}: a window of {reach} would lie wholly "
                "in padding"
            )
        out = window_output(src.dims[2 + i], kernel[i], strides[i], dilation[i], padding_l[i], padding_r[i], i)
        need_equal(dst.dims[2 + i], out, "dst spatial dim {} against what src, kernel, strides and padding give", i)
    fields: dict[str, Any] = {
        "prop_kind": INFERENCE,
        "alg_kind": alg,
        "strides": pad(strides),
        "kernel": pad(kernel),
        "padding": [pad(padding_l), pad(padding_r)],
        "accum_data_type": accumulator(src),
    }
    params = {
        "kind": kind,
        "kernel": kernel,
        "strides": strides,
        "dilation": dilation,
        "padding_l": padding_l,
        "padding_r": padding_r,
    }
    if all(d == 1 for d in dilation):
        return fill("pooling", {"src": src, "dst": dst}, params=params, **fields)
    return fill(
        "pooling_v2", {"src": src, "dst": dst}, params=params, dilation=pad([d - 1 for d in dilation]), **fields
    )


@describing
def reduction(kind: str, src: MemoryDesc, dst: MemoryDesc, *, p: float = 0.0, eps: float = 0.0) -> OpDesc:
    """Reduce the dimensions that are 1 in dst. Offsets are refused: move them into the pointer with
    ``desc.rebased()``.
    """
    need(src=src, dst=dst)
    need_written(dst, "dst")
    need_layout(src, "src")
    alg = kind_value(REDUCTION, kind, "kind")
    need_broadcastable(dst, src, "dst")
    if src.offset0 or dst.offset0:
        raise ValueError(
            "src and dst must have offset0 0 (the library ignores it here): use desc.rebased() and move the pointer"
        )
    if src.dims == dst.dims:
        raise ValueError(f"dst has src's dims {list(src.dims)}: at least one reduced dimension must be 1 in dst")
    p, eps = reduction_numbers(kind, p, eps)
    return fill(
        "reduction", {"src": src, "dst": dst}, alg_kind=alg, p=p, eps=eps, params={"kind": kind, "p": p, "eps": eps}
    )


def reduction_numbers(kind: str, p: float, eps: float) -> tuple[float, float]:
    """Return p and eps as floats. Raises TypeError, ValueError for what the p-norm ``kind`` does not take."""
    p, eps = checks.as_float(p, "p"), checks.as_float(eps, "eps")
    if kind.startswith("norm") and not p >= 1:
        raise ValueError(f"p must be at least 1 for {kind}, got {p}")
    return p, eps


@describing
def resampling(kind: str, src: MemoryDesc, dst: MemoryDesc, *, factors: Sequence[float] | None = None) -> OpDesc:
    """Resize the spatial dimensions, "nearest" (torch's nearest-exact) or "linear" (align_corners=False). factors
    default to dst/src.
    """
    need(src=src, dst=dst)
    need_written(dst, "dst")
    need_layout(src, "src")
    spatial = src.ndim - 2
    if not 1 <= spatial <= 3:
        raise ValueError(f"src must be [N, C, *spatial] with 1 to 3 spatial dimensions, got {src}")
    need_rank(dst, src.ndim, "dst")
    need_equal(dst.dims[:2], src.dims[:2], "dst [N, C] against src's")
    alg = kind_value(RESAMPLING, kind, "kind")
    if max(dst.dims[2:]) > _MOST_RESAMPLED:
        raise ValueError(
            f"dst has spatial size {list(dst.dims[2:])}, at most {_MOST_RESAMPLED} are taken: the library's tables of "
            "positions end the process where memory is short"
        )
    values = (
        tuple(d / s for s, d in zip(src.dims[2:], dst.dims[2:], strict=False))
        if factors is None
        else tuple(checks.as_float(f, "factors") for f in factors)
    )
    if len(values) != spatial or not all(v > 0 for v in values):
        raise ValueError(f"factors must be {spatial} positive numbers, got {values}")
    for i, factor in enumerate(values):
        if (
            int(src.dims[2 + i] * factor + 1e-3) != dst.dims[2 + i]
            and round(src.dims[2 + i] * factor) != dst.dims[2 + i]
        ):
            raise ValueError(
                f"dst spatial dim {i} is {dst.dims[2 + i]}, src {src.dims[2 + i]} x factor {factor} gives another size"
            )
    return fill(
        "resampling",
        {"src": src, "dst": dst},
        prop_kind=INFERENCE,
        alg_kind=alg,
        factors=[*values, *[0.0] * (12 - spatial)],
        params={"kind": kind, "factors": values},
    )


@describing
def embedding_bag(
    kind: str,
    table: MemoryDesc,
    indices: MemoryDesc,
    offsets: MemoryDesc,
    weights: MemoryDesc | None,
    dst: MemoryDesc,
    *,
    padding_idx: int = -1,
    num_threads: int = 0,
) -> OpDesc:
    """Sum, mean or maximum of table rows per bag. table [E, D], indices [L] int32, offsets [B] int32, weights [L] or
    None, dst [B, D].

    The library reads indices and offsets unchecked, and leaves empty bags undefined for mean and max:
    ``functional.embedding_bag`` checks both.
    """
    need(table=table, indices=indices, offsets=offsets, dst=dst)
    alg = kind_value(EMBEDDING_BAG, kind, "kind")
    for desc, name, rank in ((table, "table", 2), (indices, "indices", 1), (offsets, "offsets", 1), (dst, "dst", 2)):
        need_rank(desc, rank, name)
        need_layout(desc, name)
        if desc.strides != tuple(dense for dense in ((desc.dims[-1], 1) if rank == 2 else (1,))):
            raise ValueError(f"{name} must be dense and row-major, got {desc}")
    for desc, name in ((indices, "indices"), (offsets, "offsets")):
        if desc.dtype != torch.int32:
            raise TypeError(f"{name} must be int32 (the library has no wider index type), got {desc}")
    if weights is not None:
        need(weights=weights)
        need_equal(weights.dims, indices.dims, "weights dims against indices'")
        need_equal(weights.dtype, torch.float32, "weights dtype")
    need_equal(dst.dims, (offsets.dims[0], table.dims[1]), "dst dims against [bags, row length]")
    padding_idx = checks.as_int(padding_idx, "padding_idx", minimum=-1, maximum=2**31 - 1)
    num_threads = checks.as_int(num_threads, "num_threads", minimum=0, maximum=65535)
    n = native()
    ptr = n.ffi.new("zendnn_embedding_bag_desc_t *")
    op = OpDesc(
        "embedding_bag",
        ptr,
        {"src": table, "src_1": indices, "src_2": offsets, "src_3": weights, "dst": dst},
        {"kind": kind, "padding_idx": padding_idx, "num_threads": num_threads},
    )
    check(
        n.lib.zendnn_embedding_bag_desc_init(
            ptr,
            INFERENCE,
            alg,
            num_threads,
            table.ptr,
            indices.ptr,
            offsets.ptr,
            n.null if weights is None else weights.ptr,
            dst.ptr,
            padding_idx,
            1,
            0,
        ),
        "describing {}",
        op,
    )
    return op
