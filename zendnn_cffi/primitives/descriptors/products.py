"""Operations that multiply: convolutions and matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zendnn_cffi.errors import check
from zendnn_cffi.primitives import checks
from zendnn_cffi.primitives.attributes import kind_value
from zendnn_cffi.primitives.descriptors.common import (
    ALGORITHMS,
    INFERENCE,
    OpDesc,
    accumulator,
    conv_weights,
    describing,
    fill,
    need,
    need_bias,
    need_broadcastable,
    need_dense_bias,
    need_equal,
    need_rank,
    need_written,
    window_of,
    window_output,
)
from zendnn_cffi.primitives.handles import native
from zendnn_cffi.primitives.memory import MemoryDesc, pad


def _bits(src: MemoryDesc, **bits: int) -> dict[str, int]:
    """The parameters that say how many bits of src_bits and weights_bits are used, where these are not all."""
    for name, used in bits.items():
        if used not in (7, 8) or (used == 7 and src.dtype != torch.uint8):
            raise ValueError(f"{name} must be 8, or 7 for a uint8 src, got {used!r} for {src}")
    return {name: used for name, used in bits.items() if used == 7}


@describing
def convolution(
    src: MemoryDesc,
    weights: MemoryDesc,
    bias: MemoryDesc | None,
    dst: MemoryDesc,
    *,
    strides: Sequence[int] | int = 1,
    dilation: Sequence[int] | int = 1,
    padding_l: Sequence[int] | int = 0,
    padding_r: Sequence[int] | int | None = None,
    algorithm: str = "direct",
    src_bits: int = 8,
    weights_bits: int = 8,
) -> OpDesc:
    """Convolution over 1, 2 or 3 spatial dimensions.

    src [N, C, *spatial], weights [O, C, *kernel] or grouped [G, O/G, C/G, *kernel], bias [O] or None, dst [N, O, *out];
    dilation as torch counts it (1: dense). algorithm: "direct", "winograd" (3x3, stride 1) or "auto". Kernels
    without VNNI are exact where src_bits 7 says that no integer of a uint8 src is above 127, or weights_bits 7 that no
    int8 weight that multiplies it is beyond -64 and 64.
    """
    need(src=src, weights=weights, dst=dst)
    need_written(dst, "dst")
    spatial = src.ndim - 2
    if not 1 <= spatial <= 3:
        raise ValueError(f"src must be [N, C, *spatial] with 1 to 3 spatial dimensions, got {src}")
    need_rank(dst, src.ndim, "dst")
    alg = kind_value(ALGORITHMS, algorithm, "algorithm")
    strides, dilation, padding_l, padding_r = window_of(spatial, strides, dilation, padding_l, padding_r)
    groups, outputs, inputs, kernel = conv_weights(weights, spatial)
    need_equal(src.dims[1], groups * inputs, "src channels (dim 1 of {}) against weights' input channels x groups", src)
    need_equal(dst.dims[1], groups * outputs, "dst channels (dim 1 of {}) against weights' output channels", dst)
    need_equal(dst.dims[0], src.dims[0], "dst batch (dim 0) against src batch")
    for i in range(spatial):
        out = window_output(src.dims[2 + i], kernel[i], strides[i], dilation[i], padding_l[i], padding_r[i], i)
        need_equal(dst.dims[2 + i], out, "dst spatial dim {} against what src, kernel, strides and padding give", i)
    need_bias(bias, (dst.dims[1],))
    n = native()
    ptr = n.ffi.new("zendnn_convolution_desc_t *")
    status = n.lib.zendnn_dilated_convolution_forward_desc_init(
        ptr,
        INFERENCE,
        alg,
        src.ptr,
        weights.ptr,
        n.null if bias is None else bias.ptr,
        dst.ptr,
        pad(strides),
        pad([d - 1 for d in dilation]),
        pad(padding_l),
        pad(padding_r),
    )
    op = OpDesc(
        "convolution",
        ptr,
        {"src": src, "weights": weights, "bias": bias, "dst": dst},
        {
            "strides": strides,
            "dilation": dilation,
            "padding_l": padding_l,
            "padding_r": padding_r,
            "algorithm": algorithm,
            **_bits(src, src_bits=src_bits, weights_bits=weights_bits),
        },
    )
    check(status, "describing {}", op)
    return op


@describing
def deconvolution(
    src: MemoryDesc,
    weights: MemoryDesc,
    bias: MemoryDesc | None,
    dst: MemoryDesc,
    *,
    strides: Sequence[int] | int = 1,
    dilation: Sequence[int] | int = 1,
    padding_l: Sequence[int] | int = 0,
    padding_r: Sequence[int] | int | None = None,
) -> OpDesc:
    """Transposed convolution. weights are logically [O, C, *kernel] (torch's are [C, O, *kernel]: ``desc.permute``) or
    grouped
    [G, O/G, C/G, *kernel]; padding_r is torch's padding minus output_padding, and may be negative.
    """
    need(src=src, weights=weights, dst=dst)
    need_written(dst, "dst")
    spatial = src.ndim - 2
    if not 1 <= spatial <= 3:
        raise ValueError(f"src must be [N, C, *spatial] with 1 to 3 spatial dimensions, got {src}")
    need_rank(dst, src.ndim, "dst")
    strides, dilation, padding_l, padding_r = window_of(
        spatial, strides, dilation, padding_l, padding_r, negative_right=True
    )
    groups, outputs, inputs, kernel = conv_weights(weights, spatial)
    need_equal(src.dims[1], groups * inputs, "src channels (dim 1 of {}) against weights' input channels x groups", src)
    need_equal(dst.dims[1], groups * outputs, "dst channels (dim 1 of {}) against weights' output channels", dst)
    need_equal(dst.dims[0], src.dims[0], "dst batch (dim 0) against src batch")
    for i in range(spatial):
        out = (src.dims[2 + i] - 1) * strides[i] + (kernel[i] - 1) * dilation[i] + 1 - padding_l[i] - padding_r[i]
        need_equal(dst.dims[2 + i], out, "dst spatial dim {} against what src, kernel, strides and padding give", i)
    need_bias(bias, (dst.dims[1],))
    return fill(
        "deconvolution",
        {"src": src, "weights": weights, "bias": bias, "dst": dst},
        prop_kind=INFERENCE,
        alg_kind=10,
        strides=pad(strides),
        dilates=pad([d - 1 for d in dilation]),
        padding=[pad(padding_l), pad(padding_r)],
        accum_data_type=accumulator(src),
        params={"strides": strides, "dilation": dilation, "padding_l": padding_l, "padding_r": padding_r},
    )


@describing
def inner_product(
    src: MemoryDesc,
    weights: MemoryDesc,
    bias: MemoryDesc | None,
    dst: MemoryDesc,
    *,
    src_bits: int = 8,
    weights_bits: int = 8,
) -> OpDesc:
    """src [N, *K], weights [O, *K] (same K), bias [O] or None, dst [N, O]; bits as of `convolution`."""
    need(src=src, weights=weights, dst=dst)
    need_written(dst, "dst")
    need_rank(weights, src.ndim, "weights")
    need_rank(dst, 2, "dst")
    if not 2 <= src.ndim <= 5:
        raise ValueError(f"src must have 2 to 5 dimensions, got {src}")
    need_equal(weights.dims[1:], src.dims[1:], "weights' dims from 1 on against src's")
    need_equal(dst.dims, (src.dims[0], weights.dims[0]), "dst dims against [src batch, weights' outputs]")
    need_bias(bias, (dst.dims[1],))
    n = native()
    ptr = n.ffi.new("zendnn_inner_product_desc_t *")
    bits = _bits(src, src_bits=src_bits, weights_bits=weights_bits)
    op = OpDesc("inner_product", ptr, {"src": src, "weights": weights, "bias": bias, "dst": dst}, bits)
    check(
        n.lib.zendnn_inner_product_forward_desc_init(
            ptr, INFERENCE, src.ptr, weights.ptr, n.null if bias is None else bias.ptr, dst.ptr
        ),
        "describing {}",
        op,
    )
    return op


@describing
def matmul(
    src: MemoryDesc,
    weights: MemoryDesc,
    bias: MemoryDesc | None,
    dst: MemoryDesc,
    *,
    src_bits: int = 8,
    weights_bits: int = 8,
) -> OpDesc:
    """src [*B, M, K], weights [*B, K, N], dst [*B, M, N]; batch dims broadcast; bias has dst's rank, dims equal to
    dst's or 1; bits as of `convolution`.
    """
    need(src=src, weights=weights, dst=dst)
    need_written(dst, "dst")
    if not 2 <= src.ndim <= checks.MAX_RANK:
        raise ValueError(f"src must have at least 2 dimensions, got {src}")
    need_rank(weights, src.ndim, "weights")
    need_rank(dst, src.ndim, "dst")
    need_equal(weights.dims[-2], src.dims[-1], "weights' K (dim -2) against src's K (dim -1)")
    need_equal(dst.dims[-2:], (src.dims[-2], weights.dims[-1]), "dst [M, N] against src M, weights N")
    for i in range(src.ndim - 2):
        a, b = src.dims[i], weights.dims[i]
        if a != b and 1 not in (a, b):
            raise ValueError(f"batch dim {i} of src ({a}) and weights ({b}) must be equal or 1")
        need_equal(dst.dims[i], max(a, b), "dst batch dim {} against src and weights", i)
    if bias is not None:
        need_broadcastable(bias, dst, "bias")
        need_dense_bias(bias)
    n = native()
    ptr = n.ffi.new("zendnn_matmul_desc_t *")
    bits = _bits(src, src_bits=src_bits, weights_bits=weights_bits)
    op = OpDesc("matmul", ptr, {"src": src, "weights": weights, "bias": bias, "dst": dst}, bits)
    check(
        n.lib.zendnn_matmul_desc_init(ptr, src.ptr, weights.ptr, n.null if bias is None else bias.ptr, dst.ptr),
        "describing {}",
        op,
    )
    return op
