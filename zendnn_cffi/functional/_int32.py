"""The 32 bits in which 8-bit products are summed: sums beyond wrap without a word, so they are refused beforehand."""

from __future__ import annotations

import torch

WIDEST = 2**31
_LARGEST = {torch.uint8: 255, torch.int8: 128}


def largest(tensor: torch.Tensor) -> int:
    """Return the largest absolute value of an integer tensor, 0 for an empty one."""
    if tensor.numel() == 0:
        return 0
    low, high = torch.aminmax(tensor)
    return max(-int(low), int(high))


def bound_of_sums(a: torch.Tensor, largest_weight: int, alpha: int) -> int:
    """Return a number that no |alpha * sum over K| of a row of ``a`` and a column of weights exceeds.

    Raises   ValueError where it does not fit 32 bits
    """
    weight = abs(alpha) * largest_weight
    bound = a.shape[1] * _LARGEST[a.dtype] * weight
    if bound >= WIDEST:  # seldom: from K = 65,794 on, or with alpha
        magnitudes = a if a.dtype == torch.uint8 else a.to(torch.int16).abs()
        bound = int(magnitudes.sum(1, dtype=torch.int64).max()) * weight if a.numel() else 0
    if bound >= WIDEST:
        raise ValueError(
            f"a and b may give sums up to {bound}, and they are kept in 32 bits, which wrap at {WIDEST}: split K and "
            "add the parts, or scale with a post-op in place of alpha"
        )
    return bound


def saturated(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 results rounded to even and saturated to an integer type."""
    limits = torch.iinfo(dtype)
    return wide.double().round_().clamp_(limits.min, limits.max).to(dtype)
