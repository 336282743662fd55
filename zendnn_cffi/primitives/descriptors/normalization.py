"""Normalizations."""

from __future__ import annotations

import torch

from zendnn_cffi.primitives import checks
from zendnn_cffi.primitives.attributes import kind_value
from zendnn_cffi.primitives.descriptors.common import (
    INFERENCE,
    LRN,
    NORM_GLOBAL_STATS,
    NORM_RELU,
    NORM_SCALE,
    NORM_SHIFT,
    OpDesc,
    describing,
    fill,
    need,
    need_layout,
    need_written,
)
from zendnn_cffi.primitives.memory import MemoryDesc


@describing
def batch_normalization(
    src: MemoryDesc, eps: float, *, scale: bool = True, shift: bool = True, relu: bool = False
) -> OpDesc:
    """Batch normalization with given statistics: f32 [C] memories ARG_MEAN, ARG_VARIANCE and, where asked, ARG_SCALE,
    ARG_SHIFT.
    """
    need(src=src)
    need_layout(src, "src")
    need_written(src, "src")
    if src.ndim < 2:
        raise ValueError(f"src must be [N, C, ...], got {src}")
    per_channel = MemoryDesc((src.dims[1],), torch.float32)
    flags = NORM_GLOBAL_STATS | _flags(scale=scale, shift=shift) | NORM_RELU * checks.as_bool(relu, "relu")
    eps = checks.as_float(eps, "eps")
    fields = {"data_desc": src, "stat_desc": per_channel}
    if scale or shift:
        fields["data_scaleshift_desc"] = per_channel
    return fill(
        "batch_normalization",
        {"src": src},
        _fields=fields,
        prop_kind=INFERENCE,
        batch_norm_epsilon=eps,
        flags=flags,
        params={"eps": eps, "flags": flags},
    )


@describing
def layer_normalization(
    src: MemoryDesc, eps: float, *, scale: bool = True, shift: bool = True, given_statistics: bool = False
) -> OpDesc:
    """Layer normalization over the last axis; f32 [C] memories ARG_SCALE, ARG_SHIFT where asked.

    given_statistics  mean and variance are f32 memories ARG_MEAN, ARG_VARIANCE of src's shape without the last axis
    """
    need(src=src)
    need_layout(src, "src")
    need_written(src, "src")
    if src.ndim < 2:
        raise ValueError(f"src must have at least 2 dimensions, got {src}")
    flags = _flags(scale=scale, shift=shift)
    flags |= NORM_GLOBAL_STATS * checks.as_bool(given_statistics, "given_statistics")
    eps = checks.as_float(eps, "eps")
    fields = {"data_desc": src, "stat_desc": MemoryDesc(src.dims[:-1], torch.float32)}
    if scale or shift:
        fields["data_scaleshift_desc"] = MemoryDesc(src.dims[-1:], torch.float32)
    return fill(
        "layer_normalization",
        {"src": src},
        _fields=fields,
        prop_kind=INFERENCE,
        layer_norm_epsilon=eps,
        flags=flags,
        params={"eps": eps, "flags": flags},
    )


def _flags(*, scale: bool, shift: bool) -> int:
    return NORM_SCALE * checks.as_bool(scale, "scale") | NORM_SHIFT * checks.as_bool(shift, "shift")


@describing
def lrn(kind: str, src: MemoryDesc, *, local_size: int, alpha: float, beta: float, k: float = 1.0) -> OpDesc:
    """Local response normalization, kind "across_channels" (torch's) or "within_channel"."""
    need(src=src)
    need_layout(src, "src")
    need_written(src, "src")
    if src.ndim < 2:
        raise ValueError(f"src must be [N, C, ...], got {src}")
    alg = kind_value(LRN, kind, "kind")
    local_size = checks.as_int(local_size, "local_size", minimum=1, maximum=2**20)
    alpha, beta, k = checks.as_float(alpha, "alpha"), checks.as_float(beta, "beta"), checks.as_float(k, "k")
    return fill(
        "lrn",
        {"src": src},
        _fields={"data_desc": src},
        prop_kind=INFERENCE,
        alg_kind=alg,
        local_size=local_size,
        lrn_alpha=alpha,
        lrn_beta=beta,
        lrn_k=k,
        params={"kind": kind, "local_size": local_size, "alpha": alpha, "beta": beta, "k": k},
    )
