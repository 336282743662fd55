"""Arguments nobody would pass, given to every function and object: calls that return, or raise what is documented."""

from __future__ import annotations

import contextlib
import random
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.zendnn_cffi.functional.fuzzing.objects import DOCUMENTED, object_call
from zendnn_cffi import descriptors
from zendnn_cffi import functional as zf
from zendnn_cffi.primitives.attributes import BINARY, ELTWISE

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
    np.array(2),
    np.ones(2),
    np.int64(1),
    torch.tensor(1),
    torch.tensor(2.5),
    torch.ones((), device="meta"),
    torch.nn.UninitializedParameter(),
    {1: 2},
    {1, 2},
    "cpu",
    2**31,
    -(2**31),
]
SIZES = [1, 1, 2, 2, 3, 4, 5, 7, 8, 16, 17, 33]


class Dispatched(torch.Tensor):
    """A subclass that gives its memory a meaning of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Maker:
    """Random arguments: mostly plausible, so that calls reach the library."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.dtype = torch.float32
        self.garbage, self.dtypes = GARBAGE, DTYPES

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
        elif how < 0.40:
            t = self.strange(t)
        if type(t) is torch.Tensor and r.random() < 0.15 and self.is_readable(t):
            array = t.detach().numpy()
            if r.random() < 0.1 and array.ndim:
                array = array[::-1]
            if r.random() < 0.1:
                array.flags.writeable = False
            if r.random() < 0.05:
                array = array.astype(array.dtype.newbyteorder())
            return array
        return t

    def is_readable(self, t: torch.Tensor) -> bool:
        """Whether numpy may look at it."""
        plain = t.device.type == "cpu" and t.layout is torch.strided and not t.is_nested and not t.is_neg()
        return plain and t.dtype is not torch.bfloat16 and not t._is_zerotensor() and t.data_ptr() != 0

    def strange(self, t: torch.Tensor) -> torch.Tensor:
        """A tensor without memory of its own kind: storage gone or too small, lazily negated, a fake, a wrapper."""
        how = self.r.randrange(6)
        if how == 0:
            t.untyped_storage().resize_(self.r.choice([0, t.untyped_storage().nbytes() // 2]))
        elif how == 1 and t.is_floating_point() and t.dtype != torch.bfloat16:
            t = torch.complex(t.float(), t.float()).conj().imag
        elif how == 2:
            t = torch._efficientzerotensor(tuple(t.shape), dtype=t.dtype)
        elif how == 3:
            with FakeTensorMode() as mode:
                t = mode.from_tensor(t)
        elif how == 4:
            t = t.as_subclass(Dispatched)
        elif t.dim() == 2 and t.is_floating_point():
            t = torch.nested.nested_tensor([t, t])
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


MAKERS = (
    partial(conv_call, transposed=False),
    partial(conv_call, transposed=True),
    matrix_call,
    simple_call,
    simple_call,
    object_call,
)


def garbage(seed: int) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return (function, arguments, keyword arguments) of a seed."""
    m = Maker(seed)
    m.dtype = m.r.choice([torch.float32, torch.float32, torch.bfloat16])
    return m.r.choice(MAKERS)(m)


def ambient(seed: int) -> Any:
    """Return what is around the call of a seed: as a rule nothing."""
    r = random.Random(-seed)
    modes: list[Any] = [FakeTensorMode, torch.inference_mode, lambda: torch.device("meta"), torch.no_grad]
    return r.choice(modes)() if r.random() < 0.1 else contextlib.nullcontext()
