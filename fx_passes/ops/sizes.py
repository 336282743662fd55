"""Numbers about tensors. Whoever knows the shapes evaluates them, as it evaluates Python arithmetic over them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fx_passes.ops.registry import SHAPE, op


@op(kind=SHAPE)
def size(src: Any, dim: int | None = None) -> Any:
    """Return the shape of src, or one of its sizes."""
    return src.shape if dim is None else src.shape[dim]


@op(kind=SHAPE)
def rank(src: Tensor) -> int:
    """Return the number of dimensions of src."""
    return src.dim()
