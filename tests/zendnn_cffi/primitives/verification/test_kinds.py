"""The text that stands for a kind of use: what it tells apart, and what it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.zendnn_cffi.primitives.verification.support import F32, inner_product, named
from zendnn_cffi import descriptors as d
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, Attr, PostOps
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc
from zendnn_cffi.primitives.verification.kinds import kind_of, sizes_of

BF16, S8 = torch.bfloat16, torch.int8


def md(*dims: int, dtype: torch.dtype = F32, tag: str | None = None) -> MemoryDesc:
    return MemoryDesc(dims, dtype, tag)


def convolution(channels: int = 16, outputs: int = 32, size: int = 9, kernel: int = 3, **window: int) -> PrimitiveDesc:
    reach = (kernel - 1) * window.get("dilation", 1) + 1
    out = (size + 2 * window.get("padding_l", 0) - reach) // window.get("strides", 1) + 1
    op = d.convolution(
        md(2, channels, size, size, tag="nhwc"), md(outputs, channels, kernel, kernel, tag="any"), None,
        md(2, outputs, out, out, tag="nhwc"), **window,
    )  # fmt: skip
    return named("ref:any", op)


def product(attr: Attr | None = None, m: int = 5, n: int = 32) -> PrimitiveDesc:
    return named("ref:any", inner_product(m, 16, n), attr)


def test_the_text_reads_well() -> None:
    pd = named("ref:any", inner_product(), Attr(PostOps().sum(0.5).binary("add", md(1, 32)).eltwise("relu")))
    assert kind_of(pd) == (
        "inner_product ref:any | src f32 ab, weights f32 ab, dst f32 ab | "
        "sum x, binary add f32 ab 1- 1-, eltwise relu 0 0"
    )
    assert sizes_of(pd) == "-b -b" and sizes_of(product(m=1, n=33)) == "1b 1-"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: product(m=5), lambda: product(m=7)),
        (lambda: product(n=32), lambda: product(n=33)),
        (lambda: convolution(size=9), lambda: convolution(size=12)),
        (lambda: convolution(kernel=3), lambda: convolution(kernel=5)),
        (
            lambda: product(Attr(PostOps().eltwise("elu", 0.3))),
            lambda: product(Attr(PostOps().eltwise("elu", 0.7))),
        ),
    ],
)
def test_sizes_and_numbers_do_not_count(one: Callable[[], PrimitiveDesc], other: Callable[[], PrimitiveDesc]) -> None:
    assert kind_of(one()) == kind_of(other())


def post(chain: PostOps) -> Callable[[], PrimitiveDesc]:
    return lambda: product(Attr(chain))


ALL_DIFFERENT: list[Callable[[], PrimitiveDesc]] = [
    product,
    lambda: product(m=1),
    lambda: product(n=1),
    lambda: named("x64:gemm:jit", inner_product()),
    post(PostOps().eltwise("relu")),
    post(PostOps().eltwise("relu", 0.1)),
    post(PostOps().eltwise("relu", 0.0, 0.0, 2.0)),
    post(PostOps().eltwise("tanh")),
    post(PostOps().binary("add", md(5, 32))),
    post(PostOps().binary("add", md(1, 32))),
    post(PostOps().binary("add", md(5, 1))),
    post(PostOps().binary("add", md(1, 1))),
    post(PostOps().binary("mul", md(1, 32))),
    post(PostOps().binary("add", md(1, 32, dtype=BF16))),
    post(PostOps().sum()),
    post(PostOps().sum(0.5)),
    post(PostOps().sum().sum()),
    post(PostOps().sum().eltwise("relu")),
    post(PostOps().eltwise("relu").sum()),
    convolution,
    lambda: convolution(kernel=1),
    lambda: convolution(strides=2),
    lambda: convolution(dilation=2),
    lambda: convolution(padding_l=1),
    lambda: convolution(outputs=1),
    lambda: named("ref:any", d.softmax(md(3, 4, tag="ba"), 0)),
    lambda: named("ref:any", d.softmax(md(3, 4, tag="ba"), 1)),
    lambda: named("ref:any", d.softmax(md(3, 4, tag="ba"), 1, True)),
    lambda: named("ref:any", d.reduction("sum", md(3, 4), md(1, 4))),
    lambda: named("ref:any", d.reduction("sum", md(3, 4), md(3, 1))),
    lambda: named("ref:any", d.reduction("norm_lp_sum", md(3, 4), md(3, 1), p=2.0)),
    lambda: named("ref:any", d.reduction("norm_lp_sum", md(3, 4), md(3, 1), p=1.0)),
    lambda: named("ref:any", d.reduction("norm_lp_sum", md(3, 4), md(3, 1), p=2.0, eps=1.0)),
    lambda: named("ref:any", d.binary("add", md(3, 4), md(3, 4), md(3, 4))),
    lambda: named("ref:any", d.binary("add", md(3, 4), md(1, 4), md(3, 4))),
    lambda: named("ref:any", d.binary("add", md(3, 4), md(3, 1), md(3, 4))),
    lambda: named("ref:any", d.binary("add", md(3, 4), md(3, 4, dtype=BF16), md(3, 4))),
    lambda: PrimitiveDesc.reorder(md(3, 4), md(3, 4, tag="ba")),
    lambda: PrimitiveDesc.reorder(md(3, 4), md(3, 4, dtype=S8)),
    lambda: PrimitiveDesc.reorder(md(3, 4), md(3, 4, dtype=S8), Attr(output_scales=2.0)),
    lambda: PrimitiveDesc.reorder(md(3, 4), md(3, 4, dtype=S8), Attr(output_scales="runtime")),
    lambda: PrimitiveDesc.reorder(md(3, 4), md(3, 4, dtype=S8), Attr(output_scales=2.0, zero_points={ARG_DST: 0})),
    lambda: PrimitiveDesc.reorder(md(3, 4, dtype=S8), md(3, 4), Attr(zero_points={ARG_SRC: 0})),
]


@pytest.mark.needs("avx512")
def test_what_may_matter_is_told_apart() -> None:
    kinds = [kind_of(make()) for make in ALL_DIFFERENT]
    assert len(set(kinds)) == len(kinds), sorted(k for k in kinds if kinds.count(k) > 1)
