"""batch_norm, layer_norm, lrn, shuffle against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.tolerance import assert_close
from tests.zendnn_cffi.functional.support import DTYPES, dtypes, f64, few, hold, randn, ways
from zendnn_cffi import functional as zf

images = st.tuples(st.integers(1, 3), st.sampled_from([1, 3, 8, 16, 20])).flatmap(
    lambda head: st.lists(st.sampled_from([1, 2, 5, 7]), min_size=0, max_size=3).map(lambda tail: (*head, *tail))
)


@few
@given(images, dtypes, ways, st.booleans(), st.booleans(), st.booleans())
def test_batch_norm(shape: tuple[int, ...], dtype: torch.dtype, way: str, scale: bool, shift: bool, relu: bool) -> None:
    x, c = hold(randn(*shape, dtype=dtype) * 2 + 1, way), shape[1]
    mean, variance = torch.randn(c), torch.rand(c) + 0.3
    weight, bias = torch.rand(c) + 0.5 if scale else None, torch.randn(c) if shift else None
    plain = F.batch_norm(*map(f64, (x, mean, variance, weight, bias)), eps=1e-5)
    size = plain.abs().max().item() + 1
    assert_close(zf.batch_norm(x, mean, variance, weight, bias, relu=relu), plain.relu() if relu else plain, scale=size)
    same = x.clone()
    assert zf.batch_norm(same, mean, variance, weight, bias, out=same) is same
    assert_close(same, plain, scale=size)


@few
@given(
    st.lists(st.sampled_from([1, 2, 3, 17, 32]), min_size=1, max_size=4),
    st.integers(1, 2),
    dtypes,
    ways,
    st.booleans(),
    st.booleans(),
)
def test_layer_norm(shape: list[int], last: int, dtype: torch.dtype, way: str, scale: bool, shift: bool) -> None:
    normalized = shape[-last:]
    x = hold(randn(*shape, dtype=dtype) * 2 + 1, way)
    weight, bias = torch.rand(normalized) + 0.5 if scale else None, torch.randn(normalized) if shift else None
    # rounding of src is amplified where the rows have little spread
    spread = max(
        1.0, 1 / max(x.double().flatten(-last if last <= len(shape) else 0).std(-1, unbiased=False).min().item(), 1e-2)
    )
    expected = F.layer_norm(x.double(), normalized, f64(weight), f64(bias))
    assert_close(
        zf.layer_norm(x, normalized, weight, bias), expected, k=64, scale=spread * (expected.abs().max().item() + 1)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["contiguous", "channels_last", "slice"])
def test_lrn_and_shuffle(dtype: torch.dtype, way: str) -> None:
    x = hold(randn(2, 24, 5, 6, dtype=dtype), way)
    assert_close(zf.lrn(x, 5, alpha=1e-2, k=2.0), F.local_response_norm(x.double(), 5, 1e-2, 0.75, 2.0))
    assert torch.equal(zf.shuffle(x, 4), F.channel_shuffle(x, 4))
    assert torch.equal(zf.shuffle(x, 3, dim=-1), F.channel_shuffle(x.transpose(1, 3), 3).transpose(1, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zf.batch_norm(randn(2, 3, 4), randn(4), randn(3)), r"mean must have shape \[3\]"),
        (lambda: zf.batch_norm(randn(3), randn(3), randn(3)), "2 to 5 dimensions"),
        (lambda: zf.batch_norm(randn(2, 3), randn(3), randn(3), eps=-1), "eps"),
        (lambda: zf.layer_norm(randn(2, 3), 2), "normalized_shape"),
        (lambda: zf.layer_norm(randn(2, 3), (3,), randn(2)), r"weight must have shape \[3\]"),
        (lambda: zf.lrn(randn(2, 3, 4), 4), "odd"),
        (lambda: zf.lrn(randn(2, 3), 3), "3 to 5 dimensions"),
        (lambda: zf.lrn(randn(2, 3, 4), 3, kind=["across_channels"]), "kind must be one of"),
        (lambda: zf.shuffle(randn(2, 5, 4), 2), "must divide"),
        (lambda: zf.shuffle(randn(2, 5, 4), 0), "groups must be at least 1"),
        (lambda: zf.shuffle(randn(2, 5, 4), 1, 3), "dim must be at most 2"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()
