"""Operation descriptors: shapes that do not fit never reach the library, which would trust them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zendnn_cffi import MemoryDesc, PrimitiveDesc
from zendnn_cffi import descriptors as d

F32 = torch.float32


def md(*dims: int, tag: str | None = None, dtype: torch.dtype = F32) -> MemoryDesc:
    return MemoryDesc(dims, dtype, tag)


IMAGE, FILTERS = md(2, 16, 8, 8), md(32, 16, 3, 3)


def recurrent(**other: Any) -> Any:
    """An LSTM's layer of 5 steps, 3 samples, 8 inputs and 6 hidden numbers, with other arguments."""
    given = {"src": md(5, 3, 8), "weights": md(1, 1, 8, 4, 6), "weights_iter": md(1, 1, 6, 4, 6)}
    given |= {"bias": md(1, 1, 4, 6), "dst": md(5, 3, 6)}
    return d.recurrent(**{**given, "kind": "lstm", **other})


REFUSED: list[tuple[Any, str]] = [
    (lambda: d.convolution("x", FILTERS, None, IMAGE), "src must be a MemoryDesc"),  # type: ignore[arg-type]
    (lambda: d.convolution(IMAGE, FILTERS, None, md(2, 32, 8, 8)), "dst spatial dim 0.*got 8, expected 6"),
    (lambda: d.convolution(IMAGE, FILTERS, None, md(2, 31, 6, 6)), "dst channels"),
    (lambda: d.convolution(IMAGE, FILTERS, None, md(1, 32, 6, 6)), "dst batch"),
    (lambda: d.convolution(IMAGE, md(32, 8, 3, 3), None, md(2, 32, 6, 6)), "src channels"),
    (lambda: d.convolution(IMAGE, md(32, 16, 3), None, md(2, 32, 6, 6)), "weights must have 4 dimensions, or 5"),
    (lambda: d.convolution(IMAGE, FILTERS, md(31), md(2, 32, 6, 6)), "bias"),
    (lambda: d.convolution(IMAGE, FILTERS, None, md(2, 32, 6, 6), algorithm="gemm"), "direct, winograd, auto"),
    (lambda: d.convolution(IMAGE, FILTERS, None, md(2, 32, 6, 6), strides=0), "strides"),
    (lambda: d.convolution(IMAGE, FILTERS, None, md(2, 32, 6, 6), dilation=9), "reaches over 19"),
    (lambda: d.convolution(IMAGE, FILTERS, None, md(2, 32, 6, 6), strides=2**40), "32-bit"),
    (lambda: d.convolution(md(0, 16, 8, 8), FILTERS, None, md(0, 32, 6, 6)), "empty dimension"),
    (lambda: d.deconvolution(IMAGE, FILTERS, None, md(2, 32, 99, 99)), "dst spatial dim 0"),
    (lambda: d.inner_product(md(2, 5), md(3, 6), None, md(2, 3)), "weights' dims"),
    (lambda: d.inner_product(md(2, 5), md(3, 5), None, md(2, 4)), "dst dims"),
    (lambda: d.matmul(md(4, 5), md(6, 7), None, md(4, 7)), "weights' K"),
    (lambda: d.matmul(md(0, 5), md(5, 7), None, md(0, 7)), "empty dimension"),
    (lambda: d.matmul(md(2, 4, 5), md(3, 5, 7), None, md(3, 4, 7)), "batch dim 0"),
    (lambda: d.matmul(md(4, 5), md(5, 7), md(7), md(4, 7)), "bias must have 2 dimensions"),
    (lambda: d.eltwise("nothing", IMAGE), "relu"),
    (lambda: d.eltwise("relu", md(2, 3, tag="any")), "src must have a layout"),
    (lambda: d.binary("add", md(2, 3), md(2, 4), md(2, 3)), "dim 1 of b is 4: it must be 1 or 3"),
    (lambda: d.binary("add", md(2, 3), md(2, 3), md(2, 4)), "dst dims"),
    (lambda: d.softmax(md(2, 3), 2), "axis must be at most 1"),
    (lambda: d.softmax(md(2, 3), 9, dst=md(2, 3)), "axis"),
    (lambda: d.pooling("max", IMAGE, md(2, 16, 9, 9), kernel=2), "dst spatial dim 0"),
    (lambda: d.pooling("max", IMAGE, md(2, 16, 8, 8), kernel=0), "kernel"),
    (lambda: d.pooling("max", IMAGE, md(2, 16, 11, 11), kernel=2, padding_l=2), "wholly in padding"),
    (lambda: d.layer_normalization(md(5), 1e-5), "at least 2 dimensions"),
    (lambda: d.batch_normalization(md(5), 1e-5), r"\[N, C"),
    (lambda: d.reduction("sum", md(2, 3), md(2, 3)), "at least one reduced"),
    (lambda: d.reduction("sum", md(2, 3, 4), md(2, 3)), "dst must have 3 dimensions"),
    (lambda: d.reduction("sum", md(4, 6).submemory((2, 6), (2, 0)), md(2, 1)), "offset0"),
    (lambda: d.reduction("norm_lp_sum", md(2, 3), md(2, 1), p=0.5), "p must be at least 1"),
    (lambda: d.resampling("linear", IMAGE, md(2, 15, 9, 9)), r"dst \[N, C\]"),
    (lambda: d.resampling("linear", IMAGE, md(2, 16, 16, 16), factors=(3.0, 2.0)), "gives another size"),
    (lambda: d.resampling("linear", IMAGE, md(2, 16, 16, 16), factors=(2.0,)), "2 positive numbers"),
    (lambda: d.prelu(IMAGE, md(1, 15, 1, 1)), "dim 1 of weights"),
    (lambda: recurrent(kind="gated"), "rnn_tanh, rnn_relu, lstm, gru"),
    (lambda: recurrent(src=md(5, 3)), "src must have 3 dimensions"),
    (lambda: recurrent(src=md(4, 3, 8)), "dst steps and samples"),
    (lambda: recurrent(weights=md(1, 1, 8, 3, 6)), "weights dims"),
    (lambda: recurrent(weights_iter=md(1, 1, 5, 4, 6)), "weights_iter dims"),
    (lambda: recurrent(bias=md(1, 1, 3, 6)), "bias dims"),
    (
        lambda: recurrent(kind="gru", weights=md(1, 1, 8, 3, 6), weights_iter=md(1, 1, 6, 3, 6), bias=md(1, 1, 3, 6)),
        "bias dims",
    ),
    (lambda: recurrent(dst=md(5, 3, 4), weights_iter=md(1, 1, 4, 4, 6)), "projection and dst's width"),
    (lambda: recurrent(projection=md(1, 1, 6, 4)), "projection dims"),
    (lambda: recurrent(src_iter=md(1, 1, 3, 6)), "whether src_iter_c is left out"),
    (lambda: recurrent(dst_iter=md(1, 1, 2, 6), dst_iter_c=md(1, 1, 3, 6)), "dst_iter dims"),
    (lambda: recurrent(src=md(5, 3, 8, tag="any")), "src must have a layout"),
    (lambda: d.shuffle(IMAGE, 1, 5), "must divide"),
    (lambda: d.shuffle(IMAGE, 1, 0), "groups must be at least 1"),
    (lambda: d.lrn("across_channels", IMAGE, local_size=0, alpha=1.0, beta=1.0), "local_size"),
    (
        lambda: d.embedding_bag("sum", md(9, 4), md(5), md(2, dtype=torch.int32), None, md(2, 4)),
        "indices must be int32",
    ),
    (
        lambda: d.embedding_bag(
            "sum", md(9, 4, tag="ba"), md(5, dtype=torch.int32), md(2, dtype=torch.int32), None, md(2, 4)
        ),
        "dense and row-major",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


MADE = {
    "convolution": lambda: d.convolution(IMAGE, md(32, 16, 3, 3, tag="any"), None, md(2, 32, 6, 6)),
    "deconvolution": lambda: d.deconvolution(IMAGE, md(32, 16, 3, 3, tag="any"), None, md(2, 32, 10, 10)),
    "inner_product": lambda: d.inner_product(md(2, 5), md(3, 5), md(3), md(2, 3)),
    "matmul": lambda: d.matmul(md(2, 5), md(5, 3), md(1, 3), md(2, 3)),
    "eltwise": lambda: d.eltwise("relu", IMAGE),
    "binary": lambda: d.binary("add", IMAGE, md(1, 16, 1, 1), IMAGE),
    "softmax": lambda: d.softmax(IMAGE, -1),
    "logsoftmax": lambda: d.softmax(IMAGE, 1, log=True),
    "softmax_v2": lambda: d.softmax(IMAGE, 1, dst=IMAGE),
    "pooling": lambda: d.pooling("max", IMAGE, md(2, 16, 4, 4), kernel=2, strides=2),
    "pooling_v2": lambda: d.pooling("max", IMAGE, md(2, 16, 6, 6), kernel=2, dilation=2),
    "batch_normalization": lambda: d.batch_normalization(IMAGE, 1e-5),
    "layer_normalization": lambda: d.layer_normalization(IMAGE, 1e-5),
    "reduction": lambda: d.reduction("sum", IMAGE, md(2, 16, 1, 1)),
    "resampling": lambda: d.resampling("linear", IMAGE, md(2, 16, 12, 12)),
    "prelu": lambda: d.prelu(IMAGE, md(1, 16, 1, 1, tag="any")),
    "embedding_bag": lambda: d.embedding_bag(
        "sum", md(9, 4), md(5, dtype=torch.int32), md(2, dtype=torch.int32), None, md(2, 4)
    ),
    "lrn": lambda: d.lrn("across_channels", IMAGE, local_size=5, alpha=1e-4, beta=0.75),
    "shuffle": lambda: d.shuffle(IMAGE, 1, 4),
    "rnn": lambda: recurrent(),
}


@pytest.mark.parametrize("kind", MADE)
def test_every_kind_finds_an_implementation(kind: str) -> None:
    op = MADE[kind]()
    assert op.kind == kind and op.ptr.primitive_kind == d.KINDS[kind]
    pd = PrimitiveDesc(op)
    assert pd.implementation and pd.expected_args
    again = MADE[kind]()
    assert hash(again.key) == hash(op.key) and again.key == op.key
    assert kind in repr(op)


def test_every_primitive_kind_is_made() -> None:
    assert MADE.keys() | {"reorder"} == d.KINDS.keys()


def test_layouts_that_the_library_misreads_are_refused() -> None:
    """A result whose elements share addresses (rows of stride 0) was written past its end; a bias is read as dense."""
    x, rows = MemoryDesc((2, 4), torch.float32), MemoryDesc((4, 4), torch.float32, strides=(0, 1))
    bias = MemoryDesc((4,), torch.float32, strides=(2,))
    for make in (
        lambda: d.layer_normalization(rows, 1e-5),
        lambda: d.eltwise("relu", rows),
        lambda: d.inner_product(MemoryDesc((4, 4), torch.float32), MemoryDesc((4, 4), torch.float32), None, rows),
    ):
        with pytest.raises(ValueError, match="elements of the result share an address"):
            make()
    with pytest.raises(ValueError, match=r"bias has strides \(2,\), which the library ignores"):
        d.inner_product(x, MemoryDesc((4, 4), torch.float32), bias, x)
    with pytest.raises(ValueError, match=r"bias has strides"):
        d.matmul(x, MemoryDesc((4, 4), torch.float32), MemoryDesc((2, 4), torch.float32, "ba"), x)
