"""A matrix product as one step of a candidate."""

from __future__ import annotations

from fx_passes.candidates.candidates import Argument, PrimitiveTemplate, primitive_template
from fx_passes.lower.context import optimized_descs, usable_implementations
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import Attr, PostOps
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc


def product(
    left: MemoryDesc,
    right: MemoryDesc,
    result: MemoryDesc,
    post_ops: PostOps,
    args: dict[int, Argument],
    flops: int,
    first: str = "",
) -> PrimitiveTemplate | None:
    """One product by the first optimized implementation, one whose name begins with `first` before others."""

    def create() -> PrimitiveDesc:
        return PrimitiveDesc(descriptors.matmul(left, right, None, result), Attr(post_ops))

    found = optimized_descs(usable_implementations(create))
    for pd in sorted(found, key=lambda pd: not (first and pd.implementation.startswith(first))):
        return primitive_template(pd, args, "matmul", flops)
    return None
