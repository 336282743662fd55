"""A matrix product as one step of a candidate."""

from __future__ import annotations

from fx_passes.candidates.candidates import Arguments, PrimitiveTemplate, primitive_template
from fx_passes.lower.primitives import optimized_implementations
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import Attr, PostOps
from zendnn_cffi.primitives.memory import MemoryDesc


def product(
    left: MemoryDesc,
    right: MemoryDesc,
    result: MemoryDesc,
    post_ops: PostOps,
    args: Arguments,
    flops: int,
    first: str = "",
    attr: Attr | None = None,
) -> PrimitiveTemplate | None:
    """One product by the first optimized implementation, one whose name begins with `first` before others.

    attr  all attributes, where there are others than post_ops
    """
    found = optimized_implementations(descriptors.matmul, left, right, None, result, post_ops=post_ops, attr=attr)
    for pd in sorted(found, key=lambda pd: not (first and pd.implementation.startswith(first))):
        return primitive_template(pd, args, "matmul", flops)
    return None
