"""Operations that keep the shape of their source: element-wise, softmax, prelu, shuffle."""

from __future__ import annotations

from zendnn_cffi.errors import check
from zendnn_cffi.primitives import checks
from zendnn_cffi.primitives.attributes import BINARY, ELTWISE, kind_value
from zendnn_cffi.primitives.descriptors.common import (
    INFERENCE,
    OpDesc,
    describing,
    fill,
    need,
    need_broadcastable,
    need_equal,
    need_layout,
    need_written,
    normal_axis,
)
from zendnn_cffi.primitives.handles import native
from zendnn_cffi.primitives.memory import MemoryDesc


@describing
def eltwise(kind: str, src: MemoryDesc, alpha: float = 0.0, beta: float = 0.0) -> OpDesc:
    """Element-wise function (names: ``attributes.ELTWISE``); dst has src's descriptor, in place allowed."""
    need(src=src)
    need_layout(src, "src")
    need_written(src, "src")
    alg = kind_value(ELTWISE, kind, "kind")
    alpha, beta = checks.as_float(alpha, "alpha"), checks.as_float(beta, "beta")
    return fill(
        "eltwise",
        {"src": src},
        _fields={"data_desc": src},
        prop_kind=INFERENCE,
        alg_kind=alg,
        alpha=alpha,
        beta=beta,
        params={"kind": kind, "alpha": alpha, "beta": beta},
    )


@describing
def binary(kind: str, a: MemoryDesc, b: MemoryDesc, dst: MemoryDesc) -> OpDesc:
    """dst = kind(a, b); dims of b are a's or 1 (broadcast), dst has a's dims. Names: ``attributes.BINARY``; comparisons
    give 0 and 1.
    """
    need(a=a, b=b, dst=dst)
    need_layout(a, "a")
    need_layout(b, "b")
    alg = kind_value(BINARY, kind, "kind")
    need_equal(dst.dims, a.dims, "dst dims against a's")
    need_written(dst, "dst")
    need_broadcastable(b, a, "b")
    n = native()
    ptr = n.ffi.new("zendnn_binary_desc_t *")
    op = OpDesc("binary", ptr, {"src": a, "src_1": b, "dst": dst}, {"kind": kind})
    check(n.lib.zendnn_binary_desc_init(ptr, alg, a.ptr, b.ptr, dst.ptr), "describing {}", op)
    return op


@describing
def softmax(src: MemoryDesc, axis: int, log: bool = False, dst: MemoryDesc | None = None) -> OpDesc:
    """Softmax, or its logarithm, along ``axis`` (negative counts from the end); dst as src unless given (then another
    dtype is allowed).
    """
    need(src=src)
    need_layout(src, "src")
    need_written(src, "src")
    axis = normal_axis(axis, src)
    log = checks.as_bool(log, "log")
    params = {"axis": axis, "log": log}
    if dst is not None:
        need(dst=dst)
        need_equal(dst.dims, src.dims, "dst dims against src's")
        need_written(dst, "dst")
        return fill(
            "softmax_v2",
            {"src": src, "dst": dst},
            prop_kind=INFERENCE,
            alg_kind=196609 if log else 196608,
            softmax_axis=axis,
            params=params,
        )
    return fill(
        "logsoftmax" if log else "softmax",
        {"src": src},
        _fields={"data_desc": src},
        prop_kind=INFERENCE,
        softmax_axis=axis,
        params=params,
    )


@describing
def prelu(src: MemoryDesc, weights: MemoryDesc) -> OpDesc:
    """x > 0 ? x : w * x; weights have src's rank, dims equal to src's or 1 ("any" lets the library choose their
    layout).
    """
    need(src=src, weights=weights)
    need_layout(src, "src")
    need_written(src, "src")
    need_broadcastable(weights, src, "weights")
    return fill(
        "prelu",
        {"src": src, "weights": weights},
        _fields={"data_desc": src, "weights_desc": weights},
        prop_kind=INFERENCE,
    )


@describing
def shuffle(src: MemoryDesc, axis: int, groups: int) -> OpDesc:
    """Channel shuffle as torch.nn.functional.channel_shuffle(groups), along any axis that groups divides."""
    need(src=src)
    need_layout(src, "src")
    need_written(src, "src")
    axis = normal_axis(axis, src)
    groups = checks.as_int(groups, "groups", minimum=1)
    if src.dims[axis] % groups:
        raise ValueError(f"groups {groups} must divide dim {axis} of src, which is {src.dims[axis]}")
    return fill(
        "shuffle",
        {"src": src},
        _fields={"data_desc": src},
        prop_kind=INFERENCE,
        axis=axis,
        group_size=src.dims[axis] // groups,
        params={"axis": axis, "groups": groups},
    )
