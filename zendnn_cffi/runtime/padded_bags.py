"""Embedding bags with a padding index, by the kernel that PyTorch has for bags without one.

PyTorch adds row after row with one thread where a padding index is given, and lists of which bag each index is in. Its
other kernel reads ahead, and takes a third of the time. A padded row counts for nothing in a sum where its weight is 0;
a mean divides by the rows that count, so it is taken by the other kernel where no index is padding.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from zendnn_cffi.primitives.ambient import is_watched

_MODES = ("sum", "mean")
_INDICES = (torch.int32, torch.int64)
_PLAIN = (Tensor, torch.nn.Parameter)


def padded_bag(
    indices: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    mode: str,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Tensor:
    """As F.embedding_bag; sums of float32 with a padding index may differ in their last bit."""
    given = (indices, weight, offsets, mode, per_sample_weights)
    if padding_idx is None or not _is_known(*given) or not -weight.shape[0] <= padding_idx < weight.shape[0]:
        return bag_by_pytorch(*given, include_last_offset, padding_idx)
    flat = indices.reshape(-1)
    is_padding = flat == (padding_idx if padding_idx >= 0 else padding_idx + weight.shape[0])
    if mode == "mean":
        if bool(is_padding.any()):
            return bag_by_pytorch(*given, include_last_offset, padding_idx)
        scales = None
    elif not math.isfinite(weight[padding_idx].sum().item()):  # 0 times infinity is no 0
        return bag_by_pytorch(*given, include_last_offset, padding_idx)
    elif per_sample_weights is None:
        scales = is_padding.logical_not().to(weight.dtype)
    else:
        scales = per_sample_weights.reshape(-1).masked_fill(is_padding, 0.0)
    if offsets is None:
        offsets = torch.arange(0, flat.numel(), indices.shape[1], dtype=indices.dtype, device="cpu")
    # PyTorch takes another function for parameters, which also lists what gradients need
    forward_only = torch._embedding_bag_forward_only
    return forward_only(weight, flat, offsets, False, _MODES.index(mode), False, scales, include_last_offset)[0]


def bag_by_pytorch(
    indices: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    mode: str,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Tensor:
    """F.embedding_bag, its arguments in the vocabulary's order."""
    return F.embedding_bag(
        indices,
        weight,
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )


def _is_known(
    indices: Tensor, weight: Tensor, offsets: Tensor | None, mode: str, per_sample_weights: Tensor | None
) -> bool:
    """Whether the arguments are such that the other kernel is right: float32 on the CPU, and no gradient is asked."""
    if is_watched() or mode not in _MODES or torch.is_autocast_enabled("cpu"):
        return False
    tensors = [each for each in (indices, weight, offsets, per_sample_weights) if each is not None]
    if not all(type(each) in _PLAIN and each.is_cpu and each.layout is torch.strided for each in tensors):
        return False
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return False
    if weight.dtype != torch.float32 or weight.ndim != 2 or indices.dtype not in _INDICES or not indices.numel():
        return False
    if offsets is None and indices.ndim != 2:
        return False
    if offsets is not None and (indices.ndim, offsets.ndim, offsets.dtype) != (1, 1, indices.dtype):
        return False
    if per_sample_weights is None:
        return True
    return mode == "sum" and per_sample_weights.shape == indices.shape and per_sample_weights.dtype == weight.dtype
