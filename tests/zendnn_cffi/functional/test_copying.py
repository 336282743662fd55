"""reorder against torch's own copies and conversions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tolerance import assert_close
from tests.zendnn_cffi.functional.support import few, hold, randn, ways
from zendnn_cffi import functional as zf

shapes = st.lists(st.sampled_from([1, 2, 3, 5, 17]), min_size=0, max_size=5).map(tuple)
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@few
@given(shapes, ways, ways, st.sampled_from(FLOATS), st.sampled_from(FLOATS))
def test_copies_and_converts(shape: tuple[int, ...], way: str, target: str, src: torch.dtype, dst: torch.dtype) -> None:
    if {src, dst} == {torch.float16, torch.bfloat16}:
        return  # the library has no such conversion; test_refusals
    x, out = hold(randn(*shape, dtype=src), way), hold(randn(*shape, dtype=dst), target)
    assert zf.reorder(x, out=out) is out
    assert torch.equal(out, x.to(dst))
    assert torch.equal(zf.reorder(x, dtype=dst, layout="contiguous"), x.to(dst))


@pytest.mark.parametrize("layout", ["same", "contiguous", "channels_last"])
def test_layouts(layout: str) -> None:
    x = hold(randn(2, 5, 4, 3), "channels_last")
    result = zf.reorder(x, layout=layout)
    assert torch.equal(result, x)
    assert result.is_contiguous(
        memory_format=torch.contiguous_format if layout == "contiguous" else torch.channels_last
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_quantizes_with_saturation(dtype: torch.dtype) -> None:
    x = torch.tensor([-100.0, -1.26, -0.5, 0.5, 1.5, 2.5, 3.49, 100.0])
    info = torch.iinfo(dtype)
    expected = (x.double() * 4).round().clamp(info.min, info.max).to(dtype)
    assert torch.equal(zf.reorder(x, dtype=dtype, scale=4.0), expected)


def test_integers_become_floats() -> None:
    x = torch.arange(-5, 5, dtype=torch.int8)
    assert_close(zf.reorder(x, dtype=torch.float32, scale=0.25), x.double() / 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zf.reorder(randn(2, 3), layout="nhwc"), "layout must be one of"),
        (lambda: zf.reorder(randn(2, 3), layout="channels_last"), r"\[N, C"),
        (lambda: zf.reorder(randn(2, 3), dtype=torch.float64), "dtype must be one of"),
        (lambda: zf.reorder(randn(2, 3), scale="x"), "scale must be a number"),
        (lambda: zf.reorder(randn(2, 3), out=torch.zeros(3, 2)), "out must have shape"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_bfloat16_of_an_array_is_a_tensor() -> None:
    array = randn(3, 4).numpy()
    result = zf.reorder(array, dtype=torch.bfloat16)
    assert isinstance(result, torch.Tensor) and torch.equal(result, torch.from_numpy(array).bfloat16())
    assert zf.reorder(array, out=np.zeros((3, 4), np.int8)).dtype == np.int8


@pytest.mark.parametrize("shape", [(4, 5), (3, 7, 5), (2, 9, 9), (2, 3, 9, 5)])
@pytest.mark.parametrize("dim", [-1, -2])
def test_every_second_of_an_odd_number(shape: tuple[int, ...], dim: int) -> None:
    """With its gaps a row is longer than the distance to the next one, which the library does not describe."""
    whole = randn(*shape)
    item = [slice(None)] * len(shape)
    item[dim] = slice(None, None, 2)
    x = whole[tuple(item)]
    assert torch.equal(zf.eltwise(x, "relu"), x.relu())
    assert torch.equal(zf.reorder(x, dtype=torch.float32, layout="contiguous"), x)
    assert_close(zf.softmax(x, -1), x.double().softmax(-1))
    assert_close(zf.binary(x, x, "add"), x.double() * 2)


def test_results_are_not_written_there() -> None:
    out = torch.zeros(4, 5)[:, ::2]
    with pytest.raises(ValueError, match="rows begin after"):
        zf.eltwise(randn(4, 3), "relu", out=out)
    assert not out.any()
