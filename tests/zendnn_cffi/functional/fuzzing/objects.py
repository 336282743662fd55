"""The handle objects, given arguments nobody would pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from zendnn_cffi import (
    Attr,
    Engine,
    Memory,
    MemoryDesc,
    PostOps,
    Primitive,
    PrimitiveDesc,
    Stream,
    ZenDNNError,
    descriptors,
)
from zendnn_cffi.primitives.attributes import BINARY, ELTWISE

if TYPE_CHECKING:
    from tests.zendnn_cffi.functional.fuzzing.garbage import Maker

DOCUMENTED = (TypeError, ValueError, IndexError, MemoryError, ZenDNNError)


def object_call(m: Maker) -> tuple[Any, list[Any], dict[str, Any]]:
    """The objects underneath: descriptors of random layouts, memories over random buffers, executions with random
    arguments.
    """
    r = m.r
    tags = ["any", "nchw", "nhwc", "nChw16c", "ab", "ba", "abc", "acdb", "aBcd8b", "OIhw16i16o", "f32", "nothing", None]

    def desc(dims: list[int] | None = None) -> MemoryDesc:
        dims = m.dims(r.choice([1, 2, 3, 4, 4, 5])) if dims is None else dims
        if r.random() < 0.2:
            return MemoryDesc(
                m.maybe(dims), r.choice(m.dtypes), strides=m.maybe([r.choice([0, 1, 2, 50]) for _ in dims])
            )
        return MemoryDesc(
            m.maybe(dims), r.choice([torch.float32] * 8 + m.dtypes), m.maybe(r.choice([*tags, None, None, None]))
        )

    def views() -> None:
        d = desc()
        for view in (
            lambda: d.submemory(m.dims(d.ndim), m.dims(d.ndim)),
            lambda: d.reshape(m.dims()),
            lambda: d.permute(m.dims(d.ndim)),
            lambda: d.rebased(),
            lambda: MemoryDesc(d.dims, torch.float32),
        ):
            try:
                made = view()
                repr(made[0] if isinstance(made, tuple) else made)
            except DOCUMENTED:
                pass
        assert d == d and hash(d) == hash(d) and d.size_bytes >= 0 and d.format

    def execute() -> None:
        dims = [r.choice([1, 2, 3]), r.choice([1, 5, 16]), r.choice([4, 7]), r.choice([4, 7])]
        src, dst = desc(dims), desc(dims if r.random() < 0.8 else None)
        attr = Attr(PostOps().eltwise("relu", 0.1) if r.random() < 0.3 else None, r.choice(["user", "library"]))
        make = r.choice(
            [
                lambda: PrimitiveDesc.reorder(src, dst),
                lambda: PrimitiveDesc(descriptors.eltwise(r.choice([*ELTWISE]), src, 1.0, 2.0), attr),
                lambda: PrimitiveDesc(
                    descriptors.softmax(src, r.randint(-6, 6), r.random() < 0.5, r.choice([None, dst])), attr
                ),
                lambda: PrimitiveDesc(descriptors.binary(r.choice([*BINARY]), src, desc(dims), dst), attr),
                lambda: PrimitiveDesc(
                    descriptors.batch_normalization(src, 1e-5, scale=r.random() < 0.5, shift=r.random() < 0.5), attr
                ),
                lambda: PrimitiveDesc(descriptors.layer_normalization(src, 1e-5), attr),
                lambda: PrimitiveDesc(descriptors.shuffle(src, r.randint(-5, 5), r.choice([1, 2, 3, 0])), attr),
                lambda: PrimitiveDesc(
                    descriptors.lrn("across_channels", src, local_size=r.choice([1, 3, 5, 0]), alpha=1.0, beta=0.75),
                    attr,
                ),
                lambda: PrimitiveDesc(descriptors.prelu(src, desc([1, dims[1], 1, 1])), attr),
                lambda: PrimitiveDesc(
                    descriptors.reduction(
                        r.choice([*descriptors.REDUCTION]), src, desc([dims[0], dims[1], 1, 1]), p=2.0
                    ),
                    attr,
                ),
                lambda: PrimitiveDesc(descriptors.resampling("linear", src, desc([*dims[:2], 9, 9])), attr),
                lambda: PrimitiveDesc(
                    descriptors.pooling("max", src, desc([*dims[:2], dims[2] - 1, dims[3] - 1]), kernel=2), attr
                ),
                lambda: PrimitiveDesc(
                    descriptors.convolution(
                        src, desc([8, dims[1], 3, 3]), None, desc([dims[0], 8, dims[2] - 2, dims[3] - 2])
                    ),
                    attr,
                ),
                lambda: PrimitiveDesc(
                    descriptors.inner_product(src, desc([8, *dims[1:]]), None, desc([dims[0], 8])), attr
                ),
            ]
        )
        for pd in [make()]:
            repr(pd)
            primitive = Primitive(pd)
            args = {}
            for arg, expected in pd.expected_args.items():
                if r.random() < 0.97:
                    d = expected if r.random() < 0.97 else desc()
                    data: Any = torch.zeros(
                        d.size_bytes if r.random() < 0.97 else max(d.size_bytes - 1, 0), dtype=torch.uint8
                    )
                    args[arg] = Memory(d, data if r.random() < 0.97 else None)
            if r.random() < 0.03:
                args[m.r.choice([2, 3, 99, 32770])] = Memory(MemoryDesc([2], torch.float32), torch.zeros(2))
            if r.random() < 0.05 and args:
                r.choice(list(args.values())).close()
            if r.random() < 0.03:
                primitive.close()
            primitive.execute(m.maybe(args), m.maybe(None))

    def garbage() -> None:
        r.choice([Engine, Stream, MemoryDesc, MemoryDesc.wrap, Memory, PrimitiveDesc, Primitive, Attr, PostOps])(
            *(r.choice(m.garbage) for _ in range(r.randint(1, 3)))
        )

    return r.choice([views, execute, execute, execute, garbage]), [], {}
