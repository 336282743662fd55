"""Arguments nobody would pass, given to every function and object: run in a child process by test_fuzz.py.

    python fuzz.py SEED COUNT TRACE

Each call must return or raise one of the documented exceptions. TRACE always holds the call being made, so that the
parent can name the one that killed the process.
"""

from __future__ import annotations

import contextlib
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zendnn_cffi import Attr, Engine, Memory, MemoryDesc, PostOps, Primitive, PrimitiveDesc, ZenDNNError, descriptors
from zendnn_cffi import functional as zf
from zendnn_cffi.attributes import BINARY, ELTWISE

DOCUMENTED = (TypeError, ValueError, IndexError, MemoryError, ZenDNNError)
DTYPES = (
    [torch.float32] * 6
    + [torch.bfloat16] * 3
    + [torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64]
)
GARBAGE: list[Any] = [
    None,
    "x",
    b"x",
    3.5,
    -1,
    0,
    2**70,
    float("nan"),
    [],
    (),
    {},
    object(),
    True,
    np.float32(2),
    [1, "a"],
    torch.Size([2]),
]
SIZES = [1, 1, 2, 2, 3, 4, 5, 7, 8, 16, 17, 33]


class Maker:
    """Random arguments: mostly plausible, so that calls reach the library."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.dtype = torch.float32

    def dims(self, rank: int | None = None) -> list[int]:
        rank = self.r.randint(0, 5) if rank is None else rank
        return [0 if self.r.random() < 0.02 else self.r.choice(SIZES) for _ in range(rank)]

    def tensor(self, dims: list[int] | None = None, dtype: torch.dtype | None = None) -> Any:
        r = self.r
        dims = self.dims() if dims is None else dims
        dtype = dtype or (self.dtype if r.random() < 0.93 else r.choice(DTYPES))
        shape = list(dims)
        if r.random() < 0.04 and shape:
            shape[r.randrange(len(shape))] = r.choice(SIZES)
        t = (torch.randn(shape) * 3).to(dtype)
        how = r.random()
        if how < 0.15 and t.dim() >= 2:
            axes = list(range(t.dim()))
            r.shuffle(axes)
            t = t.permute(axes).contiguous().permute([axes.index(i) for i in range(t.dim())])
        elif how < 0.25 and t.dim() >= 1 and t.numel():
            axis = r.randrange(t.dim())
            t = (
                t.repeat_interleave(2, axis)
                .narrow(axis, 0, 2 * t.shape[axis])
                .index_select(axis, torch.arange(2 * t.shape[axis]))
            )
            t = t[tuple(slice(None, None, 2) if i == axis else slice(None) for i in range(t.dim()))]
        elif how < 0.30 and t.dim() in (4, 5):
            t = t.contiguous(memory_format=torch.channels_last if t.dim() == 4 else torch.channels_last_3d)
        elif how < 0.33 and t.dim() >= 1:
            t = t[:1].expand(shape) if shape[0] else t
        elif how < 0.34:
            t = t.to("meta")
        elif how < 0.35 and t.dim() == 2 and t.is_floating_point():
            t = t.to_sparse()
        elif how < 0.36 and t.is_floating_point():
            t.requires_grad_()
        if r.random() < 0.15 and t.device.type == "cpu" and t.layout is torch.strided and dtype is not torch.bfloat16:
            array = t.detach().numpy()
            if r.random() < 0.1 and array.ndim:
                array = array[::-1]
            if r.random() < 0.1:
                array.flags.writeable = False
            if r.random() < 0.05:
                array = array.astype(array.dtype.newbyteorder())
            return array
        return t

    def maybe(self, value: Any) -> Any:
        return self.r.choice(GARBAGE) if self.r.random() < 0.03 else value

    def ints(self, rank: int, values: list[int]) -> Any:
        r = self.r
        return self.maybe(r.choice(values) if r.random() < 0.5 else [r.choice(values) for _ in range(rank)])

    def post_ops(self, dims: list[int]) -> Any:
        r = self.r
        chain: list[Any] = []
        for _ in range(r.choice([0, 0, 0, 1, 1, 2, 3])):
            kind = r.random()
            if kind < 0.4:
                chain.append(
                    (
                        "eltwise",
                        r.choice([*ELTWISE, "hardsigmoid", "nothing"]),
                        r.choice([0.0, 1.0, 0.3, -2.0]),
                        r.choice([0.0, 1.0]),
                    )
                )
            elif kind < 0.7:
                other = [d if r.random() < 0.7 else 1 for d in dims]
                chain.append(("binary", r.choice(list(BINARY)), self.tensor(other) if r.random() < 0.9 else 2.0))
            elif kind < 0.85:
                chain.append(("prelu", self.tensor([r.choice([1, *(dims[1:2] or [1])])])))
            elif kind < 0.95:
                chain.append(("sum", r.choice([1.0, 0.5])))
            else:
                chain.append(r.choice(GARBAGE))
        return self.maybe(chain)

    def out(self, dims: list[int]) -> Any:
        return self.tensor(dims) if self.r.random() < 0.15 else None


def conv_call(m: Maker, transposed: bool) -> tuple[Any, list[Any], dict[str, Any]]:
    r = m.r
    spatial = r.choice([1, 2, 2, 2, 3])
    groups = r.choice([1, 1, 1, 2, 3, 4])
    n, ic, oc = r.choice([1, 2, 3]), groups * r.choice([1, 2, 5, 8, 16]), groups * r.choice([1, 2, 3, 16])
    size, kernel = [r.choice([3, 5, 9, 14]) for _ in range(spatial)], [r.choice([1, 2, 3, 5]) for _ in range(spatial)]
    weights = [ic, oc // groups, *kernel] if transposed else [oc, ic // groups, *kernel]
    kw: dict[str, Any] = {
        "stride": m.ints(spatial, [1, 1, 2, 3, 0]),
        "padding": m.ints(spatial, [0, 1, 2, -1, 9]),
        "dilation": m.ints(spatial, [1, 1, 1, 2, 5]),
        "groups": m.maybe(groups),
        "post_ops": m.post_ops([n, oc, *size]),
    }
    if transposed:
        kw["output_padding"] = m.ints(spatial, [0, 0, 0, 1])
    else:
        kw["algorithm"] = r.choice(["direct", "direct", "winograd", "auto", "gemm"])
    kw["out"] = m.out([n, oc, *size])
    bias = m.tensor([oc]) if r.random() < 0.5 else None
    return (
        (zf.deconvolution if transposed else zf.convolution),
        [m.maybe(m.tensor([n, ic, *size])), m.maybe(m.tensor(weights)), bias],
        kw,
    )


def matrix_call(m: Maker) -> tuple[Any, list[Any], dict[str, Any]]:
    r = m.r
    rows, k, n = r.choice([0, 1, 2, 5, 17]), r.choice([0, 1, 3, 8, 64]), r.choice([0, 1, 2, 16, 33])
    bias = m.tensor([n]) if r.random() < 0.5 else None
    which = r.random()
    if which < 0.35:
        batch = [m.dims(r.choice([0, 0, 1, 2])) for _ in range(2)]
        kw = {"post_ops": m.post_ops([rows, n]), "out": m.out([rows, n])}
        return (
            zf.matmul,
            [
                m.maybe(m.tensor([*batch[0], rows, k])),
                m.maybe(m.tensor([*(batch[0] if r.random() < 0.7 else batch[1]), k, n])),
                bias,
            ],
            kw,
        )
    if which < 0.65:
        return (
            zf.inner_product,
            [m.maybe(m.tensor([*m.dims(r.choice([0, 0, 1])), rows, k])), m.maybe(m.tensor([n, k])), bias],
            {"post_ops": m.post_ops([rows, n]), "out": m.out([rows, n])},
        )
    src = r.choice([torch.float32, torch.bfloat16, torch.uint8, torch.int8])
    b: Any = m.tensor([k, n], torch.int8 if src in (torch.uint8, torch.int8) else src)
    if r.random() < 0.4:
        with contextlib.suppress(*DOCUMENTED):
            b = zf.PackedWeights(b, src_dtype=src)
    kw = {"alpha": m.maybe(1), "beta": m.maybe(0), "out_dtype": m.maybe(r.choice([None, *DTYPES]))}
    chain: list[Any] = []
    for _ in range(r.choice([0, 1, 2, 9])):
        chain.append(
            r.choice(
                [
                    ("eltwise", "relu"),
                    ("eltwise", "swish", 1.0),
                    ("eltwise", "clip", 0.0, 1.0),
                    ("scale", 0.1, 3),
                    ("scale", torch.rand(max(n, 1))),
                    ("bias", m.tensor([n])),
                    ("binary", "add", m.tensor([rows, n])),
                    ("binary", "mul", m.tensor([rows, n])),
                    m.r.choice(GARBAGE),
                    ("eltwise", "mish"),
                ]
            )
        )
    kw["post_ops"] = chain
    kw["out"] = m.out([rows, n])
    return zf.gemm, [m.maybe(m.tensor([rows, k], src)), m.maybe(b), bias], kw


def simple_call(m: Maker) -> tuple[Any, list[Any], dict[str, Any]]:
    r = m.r
    dims = m.dims()
    x = m.maybe(m.tensor(dims))
    out = m.out(dims) if r.random() < 0.8 else x
    axis = m.maybe(r.randint(-6, 6))
    channels = dims[1] if len(dims) > 1 else 1
    images = m.dims(r.choice([3, 4, 4, 5]))
    c = images[1]
    return r.choice(
        [
            (zf.eltwise, [x, m.maybe(r.choice([*ELTWISE, "hardsigmoid"])), m.maybe(0.5), m.maybe(1.0)], {"out": out}),
            (
                zf.binary,
                [x, m.maybe(m.tensor([d if r.random() < 0.8 else 1 for d in dims])), m.maybe(r.choice(list(BINARY)))],
                {"out": out, "post_ops": m.post_ops(dims)},
            ),
            (zf.softmax, [x, axis], {"out": out}),
            (zf.log_softmax, [x, axis], {"out": out}),
            (zf.prelu, [x, m.maybe(m.tensor([r.choice([1, channels])]))], {"out": out}),
            (
                zf.pooling,
                [m.tensor(images), m.maybe(r.choice([*descriptors.POOLING])), m.ints(len(images) - 2, [1, 2, 3])],
                {
                    "stride": m.ints(2, [1, 2, 3]),
                    "padding": m.ints(2, [0, 0, 1, 5]),
                    "dilation": m.ints(2, [1, 1, 2]),
                    "ceil_mode": r.random() < 0.3,
                },
            ),
            (
                zf.resampling,
                [m.tensor(images), m.maybe(r.choice(["nearest", "linear"])), m.ints(len(images) - 2, [1, 3, 8, 13])],
                {},
            ),
            (
                zf.resampling,
                [m.tensor(images), "linear"],
                {"scale_factor": m.maybe(r.choice([1.0, 2.0, 0.5, -1.0, 1e12]))},
            ),
            (
                zf.reduction,
                [
                    x,
                    m.maybe(r.choice([*descriptors.REDUCTION])),
                    m.maybe(r.choice([None, 0, -1, 1, [0, 1], [0, 2], [5]])),
                    r.random() < 0.5,
                ],
                {"p": m.maybe(2.0)},
            ),
            (
                zf.batch_norm,
                [m.tensor(images), *(m.maybe(m.tensor([c])) for _ in range(4))],
                {"eps": m.maybe(1e-5), "out": m.out(images)},
            ),
            (zf.layer_norm, [x, m.maybe(dims[-r.randint(1, 3) :])], {"out": out}),
            (zf.lrn, [m.tensor(images), m.maybe(r.choice([1, 3, 5, 4]))], {}),
            (zf.shuffle, [x, m.maybe(r.choice([1, 2, 3])), axis], {}),
            (
                zf.reorder,
                [m.tensor(dims)],
                {
                    "dtype": m.maybe(r.choice(DTYPES)),
                    "layout": m.maybe(r.choice(["same", "contiguous", "channels_last"])),
                    "scale": m.maybe(1.0),
                    "out": m.out(dims),
                },
            ),
            bag_call(m),
        ]
    )


def bag_call(m: Maker) -> tuple[Any, list[Any], dict[str, Any]]:
    r = m.r
    rows, count = r.choice([0, 1, 9, 50]), r.choice([0, 1, 5, 23])
    high = rows if r.random() < 0.8 else rows + 10
    indices = torch.randint(
        -1 if r.random() < 0.1 else 0, max(high, 1), (count,), dtype=r.choice([torch.int32, torch.int64])
    )
    offsets = torch.tensor(
        sorted(r.randint(0, count + (r.random() < 0.05)) for _ in range(r.randint(0, 6))), dtype=torch.int64
    )
    if offsets.numel() and r.random() < 0.9:
        offsets[0] = 0
    return (
        zf.embedding_bag,
        [
            m.maybe(m.tensor([rows, r.choice([0, 1, 16, 17, 64, 100])])),
            m.maybe(indices),
            m.maybe(offsets),
            m.maybe(r.choice(["sum", "mean", "max"])),
        ],
        {
            "padding_idx": r.choice([None, None, 0, -1, 99]),
            "include_last_offset": r.random() < 0.2,
            "weights": m.tensor([count]) if r.random() < 0.2 else None,
        },
    )


def object_call(m: Maker) -> tuple[Any, list[Any], dict[str, Any]]:
    """The objects underneath: descriptors of random layouts, memories over random buffers, executions with random
    arguments.
    """
    r = m.r
    tags = ["any", "nchw", "nhwc", "nChw16c", "ab", "ba", "abc", "acdb", "aBcd8b", "OIhw16i16o", "f32", "nothing", None]

    def desc(dims: list[int] | None = None) -> MemoryDesc:
        dims = m.dims(r.choice([1, 2, 3, 4, 4, 5])) if dims is None else dims
        if r.random() < 0.2:
            return MemoryDesc(m.maybe(dims), r.choice(DTYPES), strides=m.maybe([r.choice([0, 1, 2, 50]) for _ in dims]))
        return MemoryDesc(
            m.maybe(dims), r.choice([torch.float32] * 8 + DTYPES), m.maybe(r.choice([*tags, None, None, None]))
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
            primitive.execute(args)

    def garbage() -> None:
        r.choice([Engine, MemoryDesc, Memory, PrimitiveDesc, Primitive, Attr, PostOps])(
            *(r.choice(GARBAGE) for _ in range(r.randint(1, 3)))
        )

    return r.choice([views, execute, execute, execute, garbage]), [], {}


MAKERS = (
    partial(conv_call, transposed=False),
    partial(conv_call, transposed=True),
    matrix_call,
    simple_call,
    simple_call,
    object_call,
)


def main(seed: int, count: int, trace: Path) -> None:
    torch.manual_seed(seed)
    returned = refused = 0
    with trace.open("w", buffering=1) as file:
        for i in range(count):
            m = Maker(seed * 1_000_003 + i)
            m.dtype = m.r.choice([torch.float32, torch.float32, torch.bfloat16])
            function, args, kw = m.r.choice(MAKERS)(m)
            file.seek(0)
            file.truncate()
            file.write(f"{i}: {function.__name__} {[show(a) for a in args]} { {k: show(v) for k, v in kw.items()} }\n")
            try:
                function(*args, **kw)
                returned += 1
            except DOCUMENTED as error:
                assert str(error), "an exception without a message"
                refused += 1
            except Exception as error:
                raise AssertionError(
                    f"undocumented {type(error).__name__} from call {i}: {trace.read_text()}"
                ) from error
    print(f"{returned} returned, {refused} refused")


def show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return (
            f"{value.dtype}{list(value.shape)}{list(value.stride()) if value.layout is torch.strided else value.layout}"
        )
    if isinstance(value, np.ndarray):
        return f"numpy {value.dtype}{list(value.shape)}{list(value.strides)}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(show(v) for v in value) + "]"
    return repr(value)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
