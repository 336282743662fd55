"""Models that torch.export traces, as symbolic tracing cannot follow them."""

from __future__ import annotations

from torch import Tensor


def needs_export(x: Tensor) -> bool:
    """True, always: torch.export knows how many bytes an element of x has, and symbolic tracing does not."""
    return x.element_size() > 0
