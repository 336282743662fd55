"""Attention, its masks and positions, and caches that grow or are written to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_passes.ops.registry import COMPUTE, op

_ALLOWED, _FORBIDDEN = (torch.tensor(number, dtype=torch.float32, device="cpu") for number in (0.0, -torch.inf))


@op(kind=COMPUTE, shape="rank")
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return softmax(query @ key.T * scale + mask) @ value over the last two dimensions: [..., L, E], [..., S, E]."""
    return F.scaled_dot_product_attention(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


@op(kind=COMPUTE, shape="rank")
def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention where S, of key, value [..., S, E] and mask [..., L, S], is another one in each call."""
    return attention(query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


@op(kind=COMPUTE, light=True, shape="rank")
def grow(cache: Tensor, new: Tensor, dim: int) -> Tensor:
    """Return new behind cache along dim: concat, where cache has another size in each call (keys and values)."""
    return torch.cat((cache, new), dim)


@op(kind=COMPUTE, light=True, opens_region=False, shape="same", writes=True)
def write_at(cache: Tensor, index: Tensor, new: Tensor, dim: int) -> Tensor:
    """Write the slices of new over those of cache at index (int64 [N]) along dim, and return cache."""
    return cache.index_copy_(dim, index, new)


@op(kind=COMPUTE)
def additive_mask(mask: Tensor, of_keys: bool = False) -> Tensor:
    """Return 0 where a boolean mask [B, H or 1, L or 1, S] is True, minus infinity elsewhere, float32.

    Dimensions 1 and 2 that repeat one row (of stride 0; with of_keys whatever their strides) have size 1 in the
    result, which is contiguous.
    """
    for place in (1, 2):
        if mask.shape[place] != 1 and (of_keys or mask.stride(place) == 0):
            mask = mask.narrow(place, 0, 1)
    return torch.where(mask, _ALLOWED, _FORBIDDEN).contiguous()  # one function: in a step PyTorch's code is in no cache


@op(kind=COMPUTE, light=True, shape="rank")
def rotary(src: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return src * cos + turned * sin, broadcast. turned: concat(-second half, first half) along the last dimension;
    or, interleaved, of each pair (a, b) of neighbours there (-b, a).
    """
    half = src.shape[-1] // 2
    if interleaved:
        turned = torch.stack((-src[..., 1::2], src[..., ::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-src[..., half:], src[..., :half]), -1)
    return src * cos + turned * sin


@op(kind=COMPUTE, light=True)
def rotation(cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return the matrices R [..., D, D] with x @ R = rotary(x, cos, sin, interleaved), for cos and sin [..., D]."""
    ones = torch.eye(cos.shape[-1], dtype=cos.dtype, device=cos.device)
    return rotary(ones, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)
