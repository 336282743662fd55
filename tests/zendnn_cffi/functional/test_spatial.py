"""pooling, resampling, reduction against torch in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.tolerance import assert_close
from tests.zendnn_cffi.functional.support import dtypes, few, hold, randn, ways
from zendnn_cffi import functional as zf
from zendnn_cffi.primitives.descriptors import POOLING

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@st.composite
def windows(draw: Any) -> dict[str, Any]:
    n = draw(st.sampled_from([1, 2, 2, 3]))
    per_dim = lambda values: tuple(draw(st.sampled_from(values)) for _ in range(n))  # noqa: E731
    kernel = per_dim([1, 2, 3])
    return {
        "src": (draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 8, 16, 20])), *per_dim([5, 7, 12])),
        "kernel": kernel,
        "stride": per_dim([1, 2, 3]),
        "padding": tuple(min(draw(st.sampled_from([0, 1])), k // 2) for k in kernel),
        "dilation": per_dim([1, 1, 2]),
        "dtype": draw(dtypes),
        "way": draw(ways),
        "ceil": draw(st.booleans()),
    }


@few
@given(windows(), st.sampled_from(list(POOLING)))
def test_pooling(p: dict[str, Any], kind: str) -> None:
    x = hold(randn(*p["src"], dtype=p["dtype"]), p["way"])
    n = x.dim() - 2
    options = {key: p[key] for key in ("stride", "padding")}
    if kind == "max":
        options |= {"dilation": p["dilation"], "ceil_mode": p["ceil"]}
        expected = MAX[n](x.double(), p["kernel"], **options)
    else:
        options |= {"ceil_mode": p["ceil"] and kind == "avg_exclude_padding"}
        expected = AVG[n](x.double(), p["kernel"], **options, count_include_pad=kind == "avg_include_padding")
    assert_close(zf.pooling(x, kind, p["kernel"], **options), expected, dtype=p["dtype"], k=math.prod(p["kernel"]))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_pooling_of_integers(dtype: torch.dtype) -> None:
    x = torch.randint(0, 100, (2, 16, 8, 8)).to(dtype)
    assert torch.equal(zf.pooling(x, "max", 2).double(), F.max_pool2d(x.double(), 2))


def test_pooling_into_a_slice_leaves_the_neighbours_alone() -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        x = randn(1, 8, 6, 6).contiguous(memory_format=layout)
        whole = torch.full((1, 20, 3, 3), 9.0).contiguous(memory_format=layout)
        zf.pooling(x, "max", 2, out=whole[:, 4:12])
        assert torch.equal(whole[:, 4:12], F.max_pool2d(x, 2))
        assert (whole[:, :4] == 9).all() and (whole[:, 12:] == 9).all()


@few
@given(st.integers(1, 3), st.data(), dtypes, ways)
def test_resampling(n: int, data: Any, dtype: torch.dtype, way: str) -> None:
    per_dim = [
        data.draw(st.tuples(st.sampled_from([1, 2, 3, 6, 9]), st.sampled_from([1, 2, 3, 7, 12]))) for _ in range(n)
    ]
    x = hold(randn(2, data.draw(st.sampled_from([1, 3, 16])), *(s for s, _ in per_dim), dtype=dtype), way)
    size = tuple(s for _, s in per_dim)
    assert torch.equal(zf.resampling(x, "nearest", size), F.interpolate(x, size, mode="nearest-exact"))
    linear = F.interpolate(x.double(), size, mode={1: "linear", 2: "bilinear", 3: "trilinear"}[n])
    assert_close(zf.resampling(x, "linear", size), linear, k=8)


def test_resampling_by_a_factor() -> None:
    x = randn(1, 3, 5, 6)
    assert torch.equal(zf.resampling(x, "nearest", scale_factor=2.0), F.interpolate(x, scale_factor=2.0))
    assert_close(
        zf.resampling(x, "linear", scale_factor=(2, 1.5)), F.interpolate(x.double(), (10, 9), mode="bilinear"), k=4
    )


@few
@given(
    st.lists(st.sampled_from([1, 2, 3, 8, 17]), min_size=1, max_size=5),
    st.sets(st.integers(0, 4), min_size=1),
    st.sampled_from(["sum", "mean", "max", "min", "mul", "norm_lp_sum"]),
    st.booleans(),
    dtypes,
    ways,
)
def test_reduction(shape: list[int], dims: set[int], kind: str, keepdim: bool, dtype: torch.dtype, way: str) -> None:
    axes = sorted({d % len(shape) for d in dims})
    count = math.prod(shape[a] for a in axes)
    spread = count**-0.5 if kind == "mul" else 1.0  # a product of many small numbers is none of float32's
    x = hold(((torch.rand(shape) - 0.5) * spread + 1).to(dtype), way)
    wide = x.double()
    if kind == "mul":
        expected = wide
        for axis in axes:
            expected = expected.prod(axis, keepdim=True)
        expected = expected if keepdim else expected.squeeze(axes)
    else:
        oracle = {
            "sum": torch.sum,
            "mean": torch.mean,
            "max": torch.amax,
            "min": torch.amin,
            "norm_lp_sum": lambda t, d, keepdim: torch.linalg.vector_norm(t, 2, d, keepdim),
        }[kind]
        expected = oracle(wide, axes, keepdim=keepdim)
    # products multiply as many relative errors as they have factors
    scale = expected.abs().max().item() * (count if kind == "mul" else 1)
    assert_close(zf.reduction(x, kind, axes, keepdim), expected, dtype=dtype, k=count, scale=scale)


NORMS = {
    "norm_lp_max": lambda s, p, eps: s.clamp_min(eps) ** (1 / p),
    "norm_lp_sum": lambda s, p, eps: (s + eps) ** (1 / p),
    "norm_lp_power_p_max": lambda s, p, eps: s.clamp_min(eps),
    "norm_lp_power_p_sum": lambda s, p, eps: s + eps,
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.5])
@pytest.mark.parametrize("eps", [0.0, 0.75])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_have_power_and_eps_whatever_the_size(kind: str, p: float, eps: float, size: int) -> None:
    x = randn(5, size, 7)
    expected = NORMS[kind]((x.double().abs() ** p).sum(1), p, eps)
    assert_close(zf.reduction(x, kind, 1, p=p, eps=eps), expected, k=size)
    with pytest.raises(ValueError, match="p must be at least 1"):
        zf.reduction(x, kind, 1, p=0.5)


def test_reduction_of_everything_and_into_out() -> None:
    x = randn(3, 5, 7)
    assert_close(zf.reduction(x, "sum"), x.double().sum(), k=105, scale=105**0.5)
    out = torch.empty(3, 7)
    assert zf.reduction(x, "mean", -2, out=out) is out
    assert_close(out, x.double().mean(1), k=5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zf.pooling(randn(1, 3, 8, 8), "sum", 2), "max, avg"),
        (lambda: zf.pooling(randn(1, 3, 8, 8), "max", 9), "reaches over 9"),
        (lambda: zf.pooling(randn(1, 3, 8, 8), "max", 2, padding=2), "padding"),
        (lambda: zf.pooling(randn(3, 8), "max", 2), r"\[N, C"),
        (lambda: zf.pooling(randn(1, 3, 8, 8), "max", 0), "kernel"),
        (lambda: zf.pooling(randn(1, 3, 5, 5), "avg_include_padding", 2, ceil_mode=True), "ceil_mode"),
        (lambda: zf.resampling(randn(1, 3, 8), "cubic", 4), "nearest"),
        (lambda: zf.resampling(randn(1, 3, 8), "linear"), "either size or scale_factor"),
        (lambda: zf.resampling(randn(1, 3, 8), "linear", 0), "size"),
        (lambda: zf.resampling(randn(1, 3, 8), "linear", scale_factor=1.7), "whole sizes"),
        (lambda: zf.reduction(randn(2, 3), "median"), "max, min"),
        (lambda: zf.reduction(randn(2, 3), "sum", 2), "dims"),
        (lambda: zf.reduction(randn(2, 3), "sum", (0, -2)), "each once"),
        (lambda: zf.reduction(torch.zeros(0, 3), "max", 0), "nothing to reduce"),
        (lambda: zf.reduction(torch.tensor(1.0), "max"), "at least one dimension"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()
