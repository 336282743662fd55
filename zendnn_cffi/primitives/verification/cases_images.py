"""Cases of what works on images: convolutions, pooling, resampling, normalizations over channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, Attr
from zendnn_cffi.primitives.descriptors import OpDesc
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.verification.cases import (
    BF16,
    F32,
    FLOATS,
    PRELU,
    S8,
    S32,
    U8,
    Case,
    Chain,
    case,
    chains,
    few_chains,
    gapped,
    name_of,
)

# layouts of images of one, two and three spatial dimensions
_FIRST, _LAST, _BLOCKED = ({1: a, 2: b, 3: c} for a, b, c in (
    ("abc", "abcd", "abcde"), ("acb", "acdb", "acdeb"), ("aBc16b", "aBcd16b", "aBcde16b")))  # fmt: skip
LAYOUTS = {"first": _FIRST, "last": _LAST, "blocked": _BLOCKED}


def image(dims: tuple[int, ...], dtype: torch.dtype, layout: str) -> MemoryDesc:
    """Return a descriptor of [N, C, *spatial]; layout "any" or a name of LAYOUTS, " gaps" behind it."""
    if layout == "any":
        return MemoryDesc(dims, dtype, "any")
    name, _, gaps = layout.partition(" ")
    tag = LAYOUTS[name][len(dims) - 2]
    return gapped(dims, dtype, tag) if gaps else MemoryDesc(dims, dtype, tag)


@dataclass(frozen=True)
class Window:
    """Sizes of a convolution: samples, groups, channels, outputs, spatial sizes, kernel, stride, dilation, padding."""

    n: int
    groups: int
    channels: int
    outputs: int
    spatial: tuple[int, ...]
    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    grouped: bool = False

    @property
    def rank(self) -> int:
        return len(self.spatial)

    def out(self) -> tuple[int, ...]:
        reach = (self.kernel - 1) * self.dilation + 1
        return tuple((s + 2 * self.padding - reach) // self.stride + 1 for s in self.spatial)

    def back(self) -> tuple[int, ...]:
        reach = (self.kernel - 1) * self.dilation + 1
        return tuple((s - 1) * self.stride + reach - 2 * self.padding for s in self.spatial)

    def weights(self) -> tuple[int, ...]:
        kernel = (self.kernel,) * self.rank
        if self.grouped:
            return (self.groups, self.outputs // self.groups, self.channels // self.groups, *kernel)
        return (self.outputs, self.channels, *kernel)


WINDOWS = (
    Window(2, 1, 16, 32, (9, 9), 3, padding=1),
    Window(1, 1, 3, 17, (11, 7), 3, stride=2, padding=1),
    Window(1, 1, 3, 32, (9, 9), 3),
    Window(3, 1, 33, 16, (5, 5), 1),
    Window(1, 1, 64, 48, (7, 7), 1),
    Window(2, 1, 16, 16, (7, 7), 1, stride=2),
    Window(2, 1, 8, 5, (8, 8), 3, dilation=2, padding=2),
    Window(1, 1, 16, 16, (1, 1), 1),
    Window(1, 1, 16, 16, (1, 1), 3, padding=1),
    Window(2, 1, 1, 1, (6, 6), 3),
    Window(1, 1, 16, 1, (6, 5), 3, padding=1),
    Window(2, 16, 16, 16, (7, 7), 3, padding=1, grouped=True),
    Window(1, 33, 33, 33, (8, 6), 3, stride=2, padding=1, grouped=True),
    Window(1, 17, 17, 17, (5, 5), 5, padding=2, grouped=True),
    Window(1, 24, 24, 24, (5, 5), 1, grouped=True),
    Window(2, 2, 32, 32, (6, 6), 3, padding=1, grouped=True),
    Window(1, 3, 9, 15, (6, 6), 3, grouped=True),
    Window(1, 4, 64, 64, (4, 4), 1, grouped=True),
    Window(2, 1, 16, 32, (19,), 3, padding=1),
    Window(1, 1, 5, 7, (9,), 1),
    Window(2, 4, 4, 4, (19,), 3, grouped=True),
    Window(1, 1, 16, 16, (4, 5, 6), 3, padding=1),
    Window(1, 1, 3, 5, (4, 4, 4), 1),
)
CHAIN_WINDOWS = (WINDOWS[0], WINDOWS[3], WINDOWS[11], WINDOWS[15])
_IMAGE_LAYOUTS = ("first", "last", "blocked", "any")


def convolution(
    w: Window,
    types: tuple[torch.dtype, torch.dtype],
    layout: str,
    to: str,
    bias: torch.dtype | None,
    algorithm: str = "direct",
) -> OpDesc:
    src, dst = types
    return descriptors.convolution(
        image((w.n, w.channels, *w.spatial), src, layout),
        MemoryDesc(w.weights(), S8 if src in (U8, S8) else src, "any"),
        MemoryDesc((w.outputs,), bias) if bias else None,
        image((w.n, w.outputs, *w.out()), dst, to),
        strides=w.stride,
        dilation=w.dilation,
        padding_l=w.padding,
        padding_r=w.padding,
        algorithm=algorithm,
    )


def convolutions(types: tuple[torch.dtype, torch.dtype]) -> Iterator[Case]:
    label = f"convolution {name_of(types[0])} {name_of(types[1])}"
    for w, layout, bias in product(WINDOWS, _IMAGE_LAYOUTS, (None, F32, BF16)):
        if bias in (None, F32, types[0]):
            yield case(f"{label} {w} {layout} bias {bias}", partial(convolution, w, types, layout, layout, bias))
    for w, layout, to in product(WINDOWS, ("last", "first"), ("last gaps", "first gaps")):
        yield case(f"{label} {w} {layout} to {to}", partial(convolution, w, types, layout, to, None))
    for w, layout in product(WINDOWS, ("last gaps", "first gaps")):
        yield case(f"{label} {w} from {layout}", partial(convolution, w, types, layout, layout[:-5], None))
    for w, layout, bias in product(WINDOWS[:4], _IMAGE_LAYOUTS, (None, F32)):
        for algorithm in ("winograd", "auto"):
            name = f"{label} {w} {layout} bias {bias} {algorithm}"
            yield case(name, partial(convolution, w, types, layout, layout, bias, algorithm))


def convolution_chains(types: tuple[torch.dtype, torch.dtype]) -> Iterator[Case]:
    for w, layout, chain in product(CHAIN_WINDOWS, ("first", "last", "blocked"), (*chains(), *PRELU)):
        name = f"convolution {name_of(types[0])} {name_of(types[1])} {w} {layout} [{chain.name}]"
        yield Case(name, partial(_with_chain, w, types, layout, chain))
    for w, layout, (kernel, stride) in product(
        (WINDOWS[3], WINDOWS[4], WINDOWS[8]), ("first", "last", "blocked"), ((3, 1), (3, 2), (5, 1))
    ):
        if w.kernel == 1:
            name = f"convolution {name_of(types[0])} {w} {layout} depthwise {kernel} {stride}"
            yield Case(name, partial(_with_depthwise, w, types, layout, kernel, stride))


def _with_chain(w: Window, types: tuple[torch.dtype, torch.dtype], layout: str, chain: Chain) -> tuple[OpDesc, Attr]:
    dims = (w.n, w.outputs, *w.out())
    entries = []
    for entry in chain.make(dims, types[1]):
        if entry[0] == "binary" and entry[2].dims == dims:  # lies as the result does
            entry = (*entry[:2], image(dims, entry[2].dtype, layout))
        entries.append(entry)
    return convolution(w, types, layout, layout, F32), Attr(type(chain.make(dims, types[1]))(entries))


def _with_depthwise(
    w: Window, types: tuple[torch.dtype, torch.dtype], layout: str, kernel: int, stride: int
) -> tuple[OpDesc, Attr]:
    from zendnn_cffi.primitives.attributes import PostOps

    chain = PostOps().depthwise(types[0], F32, types[1], kernel=kernel, stride=stride, padding=kernel // 2)
    return convolution(w, types, layout, layout, F32), Attr(chain)


def deconvolution(w: Window, types: tuple[torch.dtype, torch.dtype], layout: str, bias: bool) -> OpDesc:
    src, dst = types
    return descriptors.deconvolution(
        image((w.n, w.channels, *w.spatial), src, layout),
        MemoryDesc(w.weights(), src, "any"),
        MemoryDesc((w.outputs,), F32) if bias else None,
        image((w.n, w.outputs, *w.back()), dst, layout),
        strides=w.stride,
        dilation=w.dilation,
        padding_l=w.padding,
        padding_r=w.padding,
    )


def deconvolutions(types: tuple[torch.dtype, torch.dtype]) -> Iterator[Case]:
    label = f"deconvolution {name_of(types[0])} {name_of(types[1])}"
    for w, layout, bias in product(WINDOWS, _IMAGE_LAYOUTS, (False, True)):
        if min(w.back()) > 0:
            yield case(f"{label} {w} {layout} {bias}", partial(deconvolution, w, types, layout, bias))
    for w, layout, chain in product(CHAIN_WINDOWS, ("first", "last"), few_chains()):
        dims = (w.n, w.outputs, *w.back())
        name = f"{label} {w} {layout} [{chain.name}]"
        yield case(
            name,
            partial(deconvolution, w, types, layout, False),
            partial(lambda chain, dims: Attr(chain.make(dims, types[1])), chain, dims),
        )


def int8_convolutions() -> Iterator[Case]:
    attributes: dict[str, Callable[[], Attr]] = {
        "plain": Attr,
        "scale": partial(Attr, None, "user", 0.05),
        "zero points": partial(Attr, None, "user", 0.05, zero_points={ARG_SRC: 0, ARG_DST: 0}),
    }
    for w, (src, dst), layout, bias in product(
        WINDOWS, product((U8, S8), (F32, S32, S8, U8)), ("last", "any"), (None, F32)
    ):
        for name, attr in attributes.items():
            if dst == S32 and name != "plain":
                continue
            label = f"convolution {name_of(src)} {name_of(dst)} {w} {layout} bias {bias} {name}"
            yield case(label, partial(convolution, w, (src, dst), layout, layout, bias), attr)


@dataclass(frozen=True)
class Pool:
    dims: tuple[int, ...]
    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0

    def out(self) -> tuple[int, ...]:
        reach = (self.kernel - 1) * self.dilation + 1
        return tuple((s + 2 * self.padding - reach) // self.stride + 1 for s in self.dims[2:])


_POOLS = (
    Pool((2, 16, 8, 8), 2, 2),
    Pool((1, 33, 9, 7), 3, 2, padding=1),
    Pool((2, 5, 7, 7), 3, 1, padding=1),
    Pool((1, 17, 9, 9), 3, 1, 2),
    Pool((2, 64, 7, 7), 7),
    Pool((1, 1, 5, 5), 2),
    Pool((1, 16, 1, 1), 1),
    Pool((2, 16, 19), 3, 2, padding=1),
    Pool((1, 7, 8), 2, 2),
    Pool((1, 16, 4, 6, 5), 2, 2),
    Pool((1, 3, 5, 5, 5), 3, 1, padding=1),
    Pool((1, 16, 6, 6, 6), 2, 1, 2),
)


def poolings(dtype: torch.dtype) -> Iterator[Case]:
    layouts = (*((x, x) for x in ("first", "last", "blocked")), ("last", "last gaps"), ("first", "first gaps"),
               ("last gaps", "last"), ("first gaps", "first"), ("last", "any"), ("blocked", "any"))  # fmt: skip
    for kind, p, (layout, to) in product(descriptors.POOLING, _POOLS, layouts):
        yield case(f"pooling {kind} {name_of(dtype)} {p} {layout} {to}", partial(_pooling, kind, p, dtype, layout, to))


def _pooling(kind: str, p: Pool, dtype: torch.dtype, layout: str, to: str) -> OpDesc:
    return descriptors.pooling(
        kind,
        image(p.dims, dtype, layout),
        image((*p.dims[:2], *p.out()), dtype, to),
        kernel=p.kernel,
        strides=p.stride,
        dilation=p.dilation,
        padding_l=p.padding,
        padding_r=p.padding,
    )


_IMAGES = (
    (2, 16, 6, 7),
    (1, 17, 5, 5),
    (3, 33, 4, 4),
    (1, 64, 1, 1),
    (2, 1, 9, 9),
    (1, 1, 1, 1),
    (2, 8, 19),
    (1, 16, 4, 5, 6),
)


def normalizations(dtype: torch.dtype) -> Iterator[Case]:
    layouts = ("first", "last", "blocked", "last gaps", "first gaps")
    for dims, layout, scale, shift, relu in product(_IMAGES, layouts, (True, False), (True, False), (True, False)):
        yield case(
            f"batch_normalization {name_of(dtype)} {dims} {layout} {scale, shift, relu}",
            partial(_batch_norm, dims, dtype, layout, scale, shift, relu),
        )
    for dims, layout, kind, size in product(_IMAGES, layouts[:3], descriptors.LRN, (5, 3)):
        yield case(
            f"lrn {kind} {name_of(dtype)} {dims} {layout} {size}",
            partial(_lrn, kind, dims, dtype, layout, size),
        )


def _batch_norm(dims: tuple[int, ...], dtype: torch.dtype, layout: str, scale: bool, shift: bool, relu: bool) -> OpDesc:
    return descriptors.batch_normalization(image(dims, dtype, layout), 1e-3, scale=scale, shift=shift, relu=relu)


def _lrn(kind: str, dims: tuple[int, ...], dtype: torch.dtype, layout: str, size: int) -> OpDesc:
    return descriptors.lrn(kind, image(dims, dtype, layout), local_size=size, alpha=0.5, beta=0.75, k=2.0)


def resamplings(dtype: torch.dtype) -> Iterator[Case]:
    sizes = (((2, 16, 5, 6), (10, 12)), ((1, 17, 8, 8), (4, 4)), ((1, 5, 7, 5), (11, 3)), ((1, 16, 1, 1), (7, 7)),
             ((2, 3, 9), (18,)), ((1, 16, 3, 4, 5), (6, 8, 5)), ((1, 1, 4, 4), (8, 8)))  # fmt: skip
    for kind, (dims, to), (layout, dst) in product(
        descriptors.RESAMPLING,
        sizes,
        (("first",) * 2, ("last",) * 2, ("blocked",) * 2, ("last gaps", "last"), ("first", "any")),
    ):
        yield case(
            f"resampling {kind} {name_of(dtype)} {dims} {to} {layout} {dst}",
            partial(_resampling, kind, dims, to, dtype, layout, dst),
        )


def _resampling(
    kind: str, dims: tuple[int, ...], to: tuple[int, ...], dtype: torch.dtype, layout: str, dst: str
) -> OpDesc:
    return descriptors.resampling(kind, image(dims, dtype, layout), image((*dims[:2], *to), dtype, dst))


_PAIRS = ((F32, F32), (BF16, BF16), (BF16, F32))
GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    **{f"convolution {name_of(s)} {name_of(d)}": partial(convolutions, (s, d)) for s, d in _PAIRS},
    **{f"convolution with post-ops {name_of(s)}": partial(convolution_chains, (s, s)) for s in FLOATS},
    **{f"deconvolution {name_of(s)} {name_of(d)}": partial(deconvolutions, (s, d)) for s, d in _PAIRS},
    "int8 convolution": int8_convolutions,
    **{f"pooling {name_of(t)}": partial(poolings, t) for t in (*FLOATS, S8, U8)},
    **{f"normalization {name_of(t)}": partial(normalizations, t) for t in FLOATS},
    **{f"resampling {name_of(t)}": partial(resamplings, t) for t in FLOATS},
}
