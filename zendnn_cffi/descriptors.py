"""Operation descriptors: one function per primitive, each returning a filled ``OpDesc``.

Every function takes MemoryDesc objects ("any" lets the primitive choose a layout), checks all shapes in Python and then
fills the public C struct. Raises TypeError and ValueError for arguments that do not fit, UnsupportedError and
ZenDNNError for what the library refuses. Source: zendnn.h and zendnn_types.h of ZenDNN 5.1, one group per primitive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zendnn_cffi import checks
from zendnn_cffi.attributes import BINARY, ELTWISE, kind_value
from zendnn_cffi.errors import check
from zendnn_cffi.handles import native
from zendnn_cffi.memory import MemoryDesc, pad

_INFERENCE = 96  # zendnn_forward_inference
_F32, _S32 = 3, 4
_INT8 = (torch.int8, torch.uint8)
# zendnn_primitive_kind_t
_KINDS = {
    "reorder": 1,
    "shuffle": 2,
    "convolution": 5,
    "deconvolution": 6,
    "eltwise": 7,
    "softmax": 8,
    "pooling": 9,
    "lrn": 10,
    "batch_normalization": 11,
    "layer_normalization": 12,
    "inner_product": 13,
    "binary": 16,
    "logsoftmax": 17,
    "matmul": 18,
    "resampling": 19,
    "pooling_v2": 20,
    "reduction": 21,
    "prelu": 22,
    "softmax_v2": 23,
    "embedding_bag": 24,
}
ALGORITHMS = {"direct": 1, "winograd": 2, "auto": 3}
POOLING = {"max": 511, "avg_include_padding": 767, "avg_exclude_padding": 1023}
RESAMPLING = {"nearest": 196592, "linear": 196593}
REDUCTION = {
    "max": 196594,
    "min": 196595,
    "sum": 196596,
    "mul": 196597,
    "mean": 196598,
    "norm_lp_max": 196599,
    "norm_lp_sum": 196600,
    "norm_lp_power_p_max": 196601,
    "norm_lp_power_p_sum": 196602,
}
EMBEDDING_BAG = {"sum": 16384, "mean": 16385, "max": 16386}
LRN = {"across_channels": 2815, "within_channel": 3071}
NORM_GLOBAL_STATS, NORM_RELU, NORM_SCALE, NORM_SHIFT = 1, 4, 8, 16


class OpDesc:
    """A filled operation descriptor: ``ptr`` is the C struct, ``kind`` the primitive's name.

    descs   the memory descriptors given, by role ("src", "weights", "bias", "dst", ...)
    params  the other arguments, hashable, by name
    """

    __slots__ = ("descs", "kind", "params", "ptr")

    def __init__(
        self, kind: str, ptr: Any, descs: dict[str, MemoryDesc | None], params: dict[str, Any] | None = None
    ) -> None:
        self.kind = kind
        self.ptr = ptr
        self.descs = descs
        self.params = params or {}

    @property
    def key(self) -> tuple[Any, ...]:
        """A hashable value: equal keys make equal primitives."""
        return (self.kind, tuple(self.descs.items()), tuple(self.params.items()))

    def __repr__(self) -> str:
        parts = [f"{name} {desc!r}"[: len(name) + 120] for name, desc in self.descs.items() if desc is not None]
        parts += [f"{name}={value}" for name, value in self.params.items()]
        return f"OpDesc({self.kind}: {', '.join(parts)})"


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
) -> OpDesc:
    """Convolution over 1, 2 or 3 spatial dimensions.

    src [N, C, *spatial], weights [O, C, *kernel] or grouped [G, O/G, C/G, *kernel], bias [O] or None, dst [N, O, *out];
    dilation as torch counts it (1: dense). algorithm: "direct", "winograd" (3x3, stride 1) or "auto".
    """
    _need(src=src, weights=weights, dst=dst)
    spatial = src.ndim - 2
    if not 1 <= spatial <= 3:
        raise ValueError(f"src must be [N, C, *spatial] with 1 to 3 spatial dimensions, got {src}")
    _rank(dst, src.ndim, "dst")
    alg = kind_value(ALGORITHMS, algorithm, "algorithm")
    strides, dilation, padding_l, padding_r = _window(spatial, strides, dilation, padding_l, padding_r)
    groups, outputs, inputs, kernel = _conv_weights(weights, spatial)
    _equal(src.dims[1], groups * inputs, f"src channels (dim 1 of {src}) against weights' input channels x groups")
    _equal(dst.dims[1], groups * outputs, f"dst channels (dim 1 of {dst}) against weights' output channels")
    _equal(dst.dims[0], src.dims[0], "dst batch (dim 0) against src batch")
    for i in range(spatial):
        out = _window_output(src.dims[2 + i], kernel[i], strides[i], dilation[i], padding_l[i], padding_r[i], i)
        _equal(dst.dims[2 + i], out, f"dst spatial dim {i} against what src, kernel, strides and padding give")
    _bias(bias, (dst.dims[1],))
    n = native()
    ptr = n.ffi.new("zendnn_convolution_desc_t *")
    status = n.lib.zendnn_dilated_convolution_forward_desc_init(
        ptr,
        _INFERENCE,
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
        },
    )
    if status:
        check(status, f"describing {op}")
    return op


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
    _need(src=src, weights=weights, dst=dst)
    spatial = src.ndim - 2
    if not 1 <= spatial <= 3:
        raise ValueError(f"src must be [N, C, *spatial] with 1 to 3 spatial dimensions, got {src}")
    _rank(dst, src.ndim, "dst")
    strides, dilation, padding_l, padding_r = _window(
        spatial, strides, dilation, padding_l, padding_r, negative_right=True
    )
    groups, outputs, inputs, kernel = _conv_weights(weights, spatial)
    _equal(src.dims[1], groups * inputs, f"src channels (dim 1 of {src}) against weights' input channels x groups")
    _equal(dst.dims[1], groups * outputs, f"dst channels (dim 1 of {dst}) against weights' output channels")
    _equal(dst.dims[0], src.dims[0], "dst batch (dim 0) against src batch")
    for i in range(spatial):
        out = (src.dims[2 + i] - 1) * strides[i] + (kernel[i] - 1) * dilation[i] + 1 - padding_l[i] - padding_r[i]
        _equal(dst.dims[2 + i], out, f"dst spatial dim {i} against what src, kernel, strides and padding give")
    _bias(bias, (dst.dims[1],))
    return _fill(
        "deconvolution",
        {"src": src, "weights": weights, "bias": bias, "dst": dst},
        prop_kind=_INFERENCE,
        alg_kind=10,
        strides=pad(strides),
        dilates=pad([d - 1 for d in dilation]),
        padding=[pad(padding_l), pad(padding_r)],
        accum_data_type=_accumulator(src),
        params={"strides": strides, "dilation": dilation, "padding_l": padding_l, "padding_r": padding_r},
    )


def inner_product(src: MemoryDesc, weights: MemoryDesc, bias: MemoryDesc | None, dst: MemoryDesc) -> OpDesc:
    """src [N, *K], weights [O, *K] (same K), bias [O] or None, dst [N, O]."""
    _need(src=src, weights=weights, dst=dst)
    _rank(weights, src.ndim, "weights")
    _rank(dst, 2, "dst")
    if not 2 <= src.ndim <= 5:
        raise ValueError(f"src must have 2 to 5 dimensions, got {src}")
    _equal(weights.dims[1:], src.dims[1:], "weights' dims from 1 on against src's")
    _equal(dst.dims, (src.dims[0], weights.dims[0]), "dst dims against [src batch, weights' outputs]")
    _bias(bias, (dst.dims[1],))
    n = native()
    ptr = n.ffi.new("zendnn_inner_product_desc_t *")
    op = OpDesc("inner_product", ptr, {"src": src, "weights": weights, "bias": bias, "dst": dst})
    check(
        n.lib.zendnn_inner_product_forward_desc_init(
            ptr, _INFERENCE, src.ptr, weights.ptr, n.null if bias is None else bias.ptr, dst.ptr
        ),
        f"describing {op}",
    )
    return op


def matmul(src: MemoryDesc, weights: MemoryDesc, bias: MemoryDesc | None, dst: MemoryDesc) -> OpDesc:
    """src [*B, M, K], weights [*B, K, N], dst [*B, M, N]; batch dims broadcast; bias has dst's rank, dims equal to
    dst's or 1.
    """
    _need(src=src, weights=weights, dst=dst)
    if not 2 <= src.ndim <= checks.MAX_RANK:
        raise ValueError(f"src must have at least 2 dimensions, got {src}")
    _rank(weights, src.ndim, "weights")
    _rank(dst, src.ndim, "dst")
    _equal(weights.dims[-2], src.dims[-1], "weights' K (dim -2) against src's K (dim -1)")
    _equal(dst.dims[-2:], (src.dims[-2], weights.dims[-1]), "dst [M, N] against src M, weights N")
    for i in range(src.ndim - 2):
        a, b = src.dims[i], weights.dims[i]
        if a != b and 1 not in (a, b):
            raise ValueError(f"batch dim {i} of src ({a}) and weights ({b}) must be equal or 1")
        _equal(dst.dims[i], max(a, b), f"dst batch dim {i} against src and weights")
    if bias is not None:
        _broadcastable(bias, dst, "bias")
    n = native()
    ptr = n.ffi.new("zendnn_matmul_desc_t *")
    op = OpDesc("matmul", ptr, {"src": src, "weights": weights, "bias": bias, "dst": dst})
    check(
        n.lib.zendnn_matmul_desc_init(ptr, src.ptr, weights.ptr, n.null if bias is None else bias.ptr, dst.ptr),
        f"describing {op}",
    )
    return op


def eltwise(kind: str, src: MemoryDesc, alpha: float = 0.0, beta: float = 0.0) -> OpDesc:
    """Element-wise function (names: ``attributes.ELTWISE``); dst has src's descriptor, in place allowed."""
    _need(src=src)
    _not_any(src, "src")
    alg = kind_value(ELTWISE, kind, "kind")
    alpha, beta = checks.as_float(alpha, "alpha"), checks.as_float(beta, "beta")
    return _fill(
        "eltwise",
        {"src": src},
        _fields={"data_desc": src},
        prop_kind=_INFERENCE,
        alg_kind=alg,
        alpha=alpha,
        beta=beta,
        params={"kind": kind, "alpha": alpha, "beta": beta},
    )


def binary(kind: str, a: MemoryDesc, b: MemoryDesc, dst: MemoryDesc) -> OpDesc:
    """dst = kind(a, b); dims of b are a's or 1 (broadcast), dst has a's dims. Names: ``attributes.BINARY``; comparisons
    give 0 and 1.
    """
    _need(a=a, b=b, dst=dst)
    _not_any(a, "a")
    _not_any(b, "b")
    alg = kind_value(BINARY, kind, "kind")
    _equal(dst.dims, a.dims, "dst dims against a's")
    _broadcastable(b, a, "b")
    n = native()
    ptr = n.ffi.new("zendnn_binary_desc_t *")
    op = OpDesc("binary", ptr, {"src": a, "src_1": b, "dst": dst}, {"kind": kind})
    check(n.lib.zendnn_binary_desc_init(ptr, alg, a.ptr, b.ptr, dst.ptr), f"describing {op}")
    return op


def softmax(src: MemoryDesc, axis: int, log: bool = False, dst: MemoryDesc | None = None) -> OpDesc:
    """Softmax, or its logarithm, along ``axis`` (negative counts from the end); dst as src unless given (then another
    dtype is allowed).
    """
    _need(src=src)
    _not_any(src, "src")
    axis = _axis(axis, src)
    params = {"axis": axis, "log": bool(log)}
    if dst is not None:
        _need(dst=dst)
        _equal(dst.dims, src.dims, "dst dims against src's")
        return _fill(
            "softmax_v2",
            {"src": src, "dst": dst},
            prop_kind=_INFERENCE,
            alg_kind=196609 if log else 196608,
            softmax_axis=axis,
            params=params,
        )
    return _fill(
        "logsoftmax" if log else "softmax",
        {"src": src},
        _fields={"data_desc": src},
        prop_kind=_INFERENCE,
        softmax_axis=axis,
        params=params,
    )


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
    _need(src=src, dst=dst)
    _not_any(src, "src")
    spatial = src.ndim - 2
    if not 1 <= spatial <= 3:
        raise ValueError(f"src must be [N, C, *spatial] with 1 to 3 spatial dimensions, got {src}")
    _rank(dst, src.ndim, "dst")
    alg = kind_value(POOLING, kind, "kind")
    kernel = checks.as_dims(kernel, "kernel", rank=spatial, minimum=1)
    strides, dilation, padding_l, padding_r = _window(spatial, strides, dilation, padding_l, padding_r)
    _equal(dst.dims[:2], src.dims[:2], "dst [N, C] against src's")
    for i in range(spatial):
        reach = (kernel[i] - 1) * dilation[i] + 1
        if padding_l[i] >= reach or padding_r[i] >= reach:
            raise ValueError(
                f"padding of spatial dim {i} is {padding_l[i]}, {padding_r[i]}: a window of {reach} would lie wholly "
                "in padding"
            )
        out = _window_output(src.dims[2 + i], kernel[i], strides[i], dilation[i], padding_l[i], padding_r[i], i)
        _equal(dst.dims[2 + i], out, f"dst spatial dim {i} against what src, kernel, strides and padding give")
    fields: dict[str, Any] = {
        "prop_kind": _INFERENCE,
        "alg_kind": alg,
        "strides": pad(strides),
        "kernel": pad(kernel),
        "padding": [pad(padding_l), pad(padding_r)],
        "accum_data_type": _accumulator(src),
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
        return _fill("pooling", {"src": src, "dst": dst}, params=params, **fields)
    return _fill(
        "pooling_v2", {"src": src, "dst": dst}, params=params, dilation=pad([d - 1 for d in dilation]), **fields
    )


def batch_normalization(
    src: MemoryDesc, eps: float, *, scale: bool = True, shift: bool = True, relu: bool = False
) -> OpDesc:
    """Batch normalization with given statistics: f32 [C] memories ARG_MEAN, ARG_VARIANCE and, where asked, ARG_SCALE,
    ARG_SHIFT.
    """
    _need(src=src)
    _not_any(src, "src")
    if src.ndim < 2:
        raise ValueError(f"src must be [N, C, ...], got {src}")
    per_channel = MemoryDesc((src.dims[1],), torch.float32)
    flags = NORM_GLOBAL_STATS | NORM_SCALE * bool(scale) | NORM_SHIFT * bool(shift) | NORM_RELU * bool(relu)
    eps = checks.as_float(eps, "eps")
    fields = {"data_desc": src, "stat_desc": per_channel}
    if scale or shift:
        fields["data_scaleshift_desc"] = per_channel
    return _fill(
        "batch_normalization",
        {"src": src},
        _fields=fields,
        prop_kind=_INFERENCE,
        batch_norm_epsilon=eps,
        flags=flags,
        params={"eps": eps, "flags": flags},
    )


def layer_normalization(src: MemoryDesc, eps: float, *, scale: bool = True, shift: bool = True) -> OpDesc:
    """Layer normalization over the last axis; f32 [C] memories ARG_SCALE, ARG_SHIFT where asked."""
    _need(src=src)
    _not_any(src, "src")
    if src.ndim < 2:
        raise ValueError(f"src must have at least 2 dimensions, got {src}")
    flags = NORM_SCALE * bool(scale) | NORM_SHIFT * bool(shift)
    eps = checks.as_float(eps, "eps")
    fields = {"data_desc": src, "stat_desc": MemoryDesc(src.dims[:-1], torch.float32)}
    if flags:
        fields["data_scaleshift_desc"] = MemoryDesc(src.dims[-1:], torch.float32)
    return _fill(
        "layer_normalization",
        {"src": src},
        _fields=fields,
        prop_kind=_INFERENCE,
        layer_norm_epsilon=eps,
        flags=flags,
        params={"eps": eps, "flags": flags},
    )


def reduction(kind: str, src: MemoryDesc, dst: MemoryDesc, *, p: float = 0.0, eps: float = 0.0) -> OpDesc:
    """Reduce the dimensions that are 1 in dst. Offsets are refused: move them into the pointer with
    ``desc.rebased()``.
    """
    _need(src=src, dst=dst)
    _not_any(src, "src")
    alg = kind_value(REDUCTION, kind, "kind")
    _broadcastable(dst, src, "dst")
    if src.offset0 or dst.offset0:
        raise ValueError(
            "src and dst must have offset0 0 (the library ignores it here): use desc.rebased() and move the pointer"
        )
    if src.dims == dst.dims:
        raise ValueError(f"dst has src's dims {list(src.dims)}: at least one reduced dimension must be 1 in dst")
    p, eps = checks.as_float(p, "p"), checks.as_float(eps, "eps")
    if kind.startswith("norm") and not p >= 1:
        raise ValueError(f"p must be at least 1 for {kind}, got {p}")
    return _fill(
        "reduction", {"src": src, "dst": dst}, alg_kind=alg, p=p, eps=eps, params={"kind": kind, "p": p, "eps": eps}
    )


def resampling(kind: str, src: MemoryDesc, dst: MemoryDesc, *, factors: Sequence[float] | None = None) -> OpDesc:
    """Resize the spatial dimensions, "nearest" (torch's nearest-exact) or "linear" (align_corners=False). factors
    default to dst/src.
    """
    _need(src=src, dst=dst)
    _not_any(src, "src")
    spatial = src.ndim - 2
    if not 1 <= spatial <= 3:
        raise ValueError(f"src must be [N, C, *spatial] with 1 to 3 spatial dimensions, got {src}")
    _rank(dst, src.ndim, "dst")
    _equal(dst.dims[:2], src.dims[:2], "dst [N, C] against src's")
    alg = kind_value(RESAMPLING, kind, "kind")
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
    return _fill(
        "resampling",
        {"src": src, "dst": dst},
        prop_kind=_INFERENCE,
        alg_kind=alg,
        factors=[*values, *[0.0] * (12 - spatial)],
        params={"kind": kind, "factors": values},
    )


def prelu(src: MemoryDesc, weights: MemoryDesc) -> OpDesc:
    """x > 0 ? x : w * x; weights have src's rank, dims equal to src's or 1 ("any" lets the library choose their
    layout).
    """
    _need(src=src, weights=weights)
    _not_any(src, "src")
    _broadcastable(weights, src, "weights")
    return _fill(
        "prelu",
        {"src": src, "weights": weights},
        _fields={"data_desc": src, "weights_desc": weights},
        prop_kind=_INFERENCE,
    )


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
    _need(table=table, indices=indices, offsets=offsets, dst=dst)
    alg = kind_value(EMBEDDING_BAG, kind, "kind")
    for desc, name, rank in ((table, "table", 2), (indices, "indices", 1), (offsets, "offsets", 1), (dst, "dst", 2)):
        _rank(desc, rank, name)
        _not_any(desc, name)
        if desc.strides != tuple(dense for dense in ((desc.dims[-1], 1) if rank == 2 else (1,))):
            raise ValueError(f"{name} must be dense and row-major, got {desc}")
    for desc, name in ((indices, "indices"), (offsets, "offsets")):
        if desc.dtype != torch.int32:
            raise TypeError(f"{name} must be int32 (the library has no wider index type), got {desc}")
    if weights is not None:
        _need(weights=weights)
        _equal(weights.dims, indices.dims, "weights dims against indices'")
        _equal(weights.dtype, torch.float32, "weights dtype")
    _equal(dst.dims, (offsets.dims[0], table.dims[1]), "dst dims against [bags, row length]")
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
            _INFERENCE,
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
        f"describing {op}",
    )
    return op


def lrn(kind: str, src: MemoryDesc, *, local_size: int, alpha: float, beta: float, k: float = 1.0) -> OpDesc:
    """Local response normalization, kind "across_channels" (torch's) or "within_channel"."""
    _need(src=src)
    _not_any(src, "src")
    if src.ndim < 2:
        raise ValueError(f"src must be [N, C, ...], got {src}")
    alg = kind_value(LRN, kind, "kind")
    local_size = checks.as_int(local_size, "local_size", minimum=1, maximum=2**20)
    alpha, beta, k = checks.as_float(alpha, "alpha"), checks.as_float(beta, "beta"), checks.as_float(k, "k")
    return _fill(
        "lrn",
        {"src": src},
        _fields={"data_desc": src},
        prop_kind=_INFERENCE,
        alg_kind=alg,
        local_size=local_size,
        lrn_alpha=alpha,
        lrn_beta=beta,
        lrn_k=k,
        params={"kind": kind, "local_size": local_size, "alpha": alpha, "beta": beta, "k": k},
    )


def shuffle(src: MemoryDesc, axis: int, groups: int) -> OpDesc:
    """Channel shuffle as torch.nn.functional.channel_shuffle(groups), along any axis that groups divides."""
    _need(src=src)
    _not_any(src, "src")
    axis = _axis(axis, src)
    groups = checks.as_int(groups, "groups", minimum=1)
    if src.dims[axis] % groups:
        raise ValueError(f"groups {groups} must divide dim {axis} of src, which is {src.dims[axis]}")
    return _fill(
        "shuffle",
        {"src": src},
        _fields={"data_desc": src},
        prop_kind=_INFERENCE,
        axis=axis,
        group_size=src.dims[axis] // groups,
        params={"axis": axis, "groups": groups},
    )


# ---- filling and checking


def _fill(
    kind: str,
    descs: dict[str, MemoryDesc | None],
    *,
    params: dict[str, Any] | None = None,
    _fields: Mapping[str, MemoryDesc | None] | None = None,
    **values: Any,
) -> OpDesc:
    """Return an OpDesc of a zeroed struct with the given fields; descs go to fields named <role>_desc unless _fields
    says where.
    """
    ptr = native().ffi.new(f"zendnn_{kind}_desc_t *")
    ptr.primitive_kind = _KINDS[kind]
    for name, value in values.items():
        setattr(ptr, name, value)
    for name, desc in (_fields or {f"{role}_desc": desc for role, desc in descs.items()}).items():
        if desc is not None:
            setattr(ptr, name, desc.ptr[0])
    return OpDesc(kind, ptr, descs, params)


def _need(**descs: Any) -> None:
    """Check that each is a MemoryDesc without empty dimensions: primitives on empty memory are undefined (matmul
    divides by zero).
    """
    for name, desc in descs.items():
        if not isinstance(desc, MemoryDesc):
            raise TypeError(f"{name} must be a MemoryDesc, got {type(desc).__name__}")
        if 0 in desc.dims:
            raise ValueError(f"{name} has an empty dimension, {list(desc.dims)}: there is nothing to compute")


def _not_any(desc: MemoryDesc, name: str) -> None:
    if desc.is_any:
        raise ValueError(f"{name} must have a layout: this primitive does not choose one for 'any'")


def _rank(desc: MemoryDesc, rank: int, name: str) -> None:
    if desc.ndim != rank:
        raise ValueError(f"{name} must have {rank} dimensions, got {desc}")


def _equal(got: Any, expected: Any, what: str) -> None:
    if got != expected:
        raise ValueError(f"{what}: got {got}, expected {expected}")


def _bias(bias: MemoryDesc | None, dims: tuple[int, ...]) -> None:
    if bias is not None:
        _need(bias=bias)
        _equal(bias.dims, dims, "bias dims against the output channels")


def _broadcastable(desc: MemoryDesc, to: MemoryDesc, name: str) -> None:
    _need(**{name: desc})
    _rank(desc, to.ndim, name)
    for i, (d, t) in enumerate(zip(desc.dims, to.dims, strict=False)):
        if d not in (1, t):
            raise ValueError(f"dim {i} of {name} is {d}: it must be 1 or {t}")


def _axis(axis: Any, desc: MemoryDesc) -> int:
    axis = checks.as_int(axis, "axis", minimum=-desc.ndim, maximum=desc.ndim - 1)
    return axis % desc.ndim


def _accumulator(src: MemoryDesc) -> int:
    return _S32 if src.dtype in _INT8 or src.dtype == torch.int32 else _F32


_Window = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _window(
    spatial: int, strides: Any, dilation: Any, padding_l: Any, padding_r: Any, negative_right: bool = False
) -> _Window:
    strides = checks.as_dims(strides, "strides", rank=spatial, minimum=1)
    dilation = checks.as_dims(dilation, "dilation", rank=spatial, minimum=1)
    padding_l = checks.as_dims(padding_l, "padding_l", rank=spatial)
    padding_r = (
        padding_l
        if padding_r is None
        else checks.as_dims(padding_r, "padding_r", rank=spatial, minimum=-(2**31) if negative_right else 0)
    )
    for name, values in (
        ("strides", strides),
        ("dilation", dilation),
        ("padding_l", padding_l),
        ("padding_r", padding_r),
    ):
        if max(values) >= 2**31:
            raise ValueError(f"{name} {values} does not fit the library's 32-bit arithmetic")
    return strides, dilation, padding_l, padding_r


def _window_output(size: int, kernel: int, stride: int, dilation: int, left: int, right: int, axis: int) -> int:
    reach = (kernel - 1) * dilation + 1
    if size + left + right < reach:
        raise ValueError(
            f"the kernel reaches over {reach} elements in spatial dim {axis}, src with padding has "
            f"{size + left + right}"
        )
    return (size + left + right - reach) // stride + 1


def _conv_weights(weights: MemoryDesc, spatial: int) -> tuple[int, int, int, tuple[int, ...]]:
    """Return (groups, outputs per group, inputs per group, kernel)."""
    if weights.ndim == spatial + 2:
        return 1, weights.dims[0], weights.dims[1], weights.dims[2:]
    if weights.ndim == spatial + 3:
        return weights.dims[0], weights.dims[1], weights.dims[2], weights.dims[3:]
    raise ValueError(f"weights must have {spatial + 2} dimensions, or {spatial + 3} with groups first, got {weights}")
