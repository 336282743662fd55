"""Sizes that those a little smaller share."""

from __future__ import annotations


def rounded_up(size: int) -> int:
    """Return size, or up to an eighth more: one of eight sizes between powers of two. size is at least 1."""
    step = 1 << max(size.bit_length() - 4, 0)
    return -(-size // step) * step
