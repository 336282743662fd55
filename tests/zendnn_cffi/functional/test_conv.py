"""convolution and deconvolution against torch in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.tolerance import assert_close
from tests.zendnn_cffi.functional.support import DTYPES, dtypes, few, hold, randn, ways
from zendnn_cffi import UnsupportedError
from zendnn_cffi import functional as zf

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
DECONV = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@st.composite
def problems(draw: Any) -> dict[str, Any]:
    spatial = draw(st.sampled_from([1, 2, 2, 2, 3]))
    per_dim = lambda values: tuple(draw(st.sampled_from(values)) for _ in range(spatial))  # noqa: E731
    groups = draw(st.sampled_from([1, 1, 2, 3, "depthwise"]))
    inputs = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 17]))
    if groups == "depthwise":
        channels, outputs, groups = inputs, inputs * draw(st.sampled_from([1, 1, 2])), inputs
    else:
        channels, outputs = groups * inputs, groups * draw(st.sampled_from([1, 2, 7, 16, 33]))
    return {
        "src": (draw(st.integers(1, 3)), channels, *per_dim([5, 7, 9, 14])),
        "outputs": outputs,
        "kernel": per_dim([1, 2, 3, 5]),
        "stride": per_dim([1, 1, 2, 3]),
        "padding": per_dim([0, 1, 2]),
        "dilation": per_dim([1, 1, 2]),
        "groups": groups,
        "bias": draw(st.booleans()),
        "dtype": draw(dtypes),
        "way": draw(ways),
    }


def fits(p: dict[str, Any]) -> bool:
    return all(
        s + 2 * pad >= (k - 1) * d + 1
        for s, pad, k, d in zip(p["src"][2:], p["padding"], p["kernel"], p["dilation"], strict=True)
    )


@few
@given(problems().filter(fits), st.sampled_from([(), (("eltwise", "relu"),), (("eltwise", "clip", -0.5, 2.0),)]))
def test_convolution(p: dict[str, Any], post_ops: Any) -> None:
    x = hold(randn(*p["src"], dtype=p["dtype"]), p["way"])
    w = randn(p["outputs"], p["src"][1] // p["groups"], *p["kernel"], dtype=p["dtype"])
    b = torch.randn(p["outputs"]) if p["bias"] else None
    options = {key: p[key] for key in ("stride", "padding", "dilation", "groups")}
    actual = zf.convolution(x, w, b, **options, post_ops=post_ops)
    plain = CONV[x.dim() - 2](x.double(), w.double(), None if b is None else b.double(), **options)
    expected = plain.relu() if post_ops[:1] == (("eltwise", "relu"),) else plain.clamp(-0.5, 2.0) if post_ops else plain
    assert actual.dtype == x.dtype
    assert_close(actual, expected, k=math.prod(w.shape[1:]), scale=plain.abs().max().item())


@few
@given(problems())
def test_deconvolution(p: dict[str, Any]) -> None:
    x = hold(randn(*p["src"], dtype=p["dtype"]), p["way"])
    outputs = p["outputs"] // p["groups"] * p["groups"]
    w = randn(p["src"][1], outputs // p["groups"], *p["kernel"], dtype=p["dtype"])
    b = torch.randn(outputs) if p["bias"] else None
    padding = tuple(
        min(pad, ((k - 1) * d) // 2) for pad, k, d in zip(p["padding"], p["kernel"], p["dilation"], strict=True)
    )
    extra = tuple(s - 1 for s in p["stride"])
    options = {
        "stride": p["stride"],
        "padding": padding,
        "output_padding": extra,
        "dilation": p["dilation"],
        "groups": p["groups"],
    }
    actual = zf.deconvolution(x, w, b, **options)
    expected = DECONV[x.dim() - 2](x.double(), w.double(), None if b is None else b.double(), **options)
    assert_close(actual, expected, k=math.prod(p["kernel"]) * p["src"][1])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_result_lies_as_the_source_does(layout: torch.memory_format) -> None:
    x = randn(2, 8, 6, 7).contiguous(memory_format=layout)
    assert zf.convolution(x, randn(4, 8, 3, 3)).is_contiguous(memory_format=layout)


def test_padding_of_each_side() -> None:
    x, w = randn(1, 3, 6, 7), randn(4, 3, 3, 3)
    expected = F.conv2d(F.pad(x.double(), (2, 1, 0, 3)), w.double())
    assert_close(zf.convolution(x, w, padding=(0, 2), padding_r=(3, 1)), expected, k=27)


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("algorithm", ["winograd", "auto"])
def test_algorithms(algorithm: str) -> None:
    x, w = randn(2, 32, 14, 14), randn(32, 32, 3, 3)
    expected = F.conv2d(x.double(), w.double(), padding=1)
    assert_close(zf.convolution(x, w, padding=1, algorithm=algorithm), expected, k=16 * 288)  # transforms add roundings


def test_winograd_refuses_what_it_cannot_do() -> None:
    with pytest.raises(UnsupportedError, match="winograd"):
        zf.convolution(randn(1, 3, 9, 9), randn(4, 3, 5, 5), algorithm="winograd")


@pytest.mark.parametrize("way", ["contiguous", "channels_last", "slice"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chains_of_post_ops(dtype: torch.dtype, way: str) -> None:
    x, w = hold(randn(2, 16, 9, 9, dtype=dtype), way), randn(24, 16, 3, 3, dtype=dtype)
    plain = F.conv2d(x.double(), w.double(), padding=1)
    residual, channel, slope = hold(randn(2, 24, 9, 9, dtype=dtype), way), randn(1, 24, 1, 1), torch.rand(24)
    out = hold(randn(2, 24, 9, 9, dtype=dtype), way)
    before = out.double()
    result = zf.convolution(
        x,
        w,
        padding=1,
        out=out,
        post_ops=[
            ("sum", 0.5),
            ("binary", "mul", channel),
            ("prelu", slope),
            ("binary", "add", residual),
            ("eltwise", "hardsigmoid"),
            ("binary", "add", 2.0),
        ],
    )
    assert result is out
    chained = F.hardsigmoid(F.prelu((plain + 0.5 * before) * channel.double(), slope.double()) + residual.double()) + 2
    assert_close(out, chained, dtype=dtype, k=16 * 9, scale=plain.abs().max().item() * channel.abs().max().item())


def test_an_output_between_other_data_leaves_it_alone() -> None:
    x, w = randn(1, 8, 6, 6), randn(4, 8, 3, 3)
    for layout in (torch.contiguous_format, torch.channels_last):
        whole = torch.full((1, 12, 4, 4), 9.0).contiguous(memory_format=layout)
        zf.convolution(x.contiguous(memory_format=layout), w, out=whole[:, 4:8])
        assert_close(whole[:, 4:8], F.conv2d(x.double(), w.double()), k=72)
        assert (whole[:, :4] == 9).all() and (whole[:, 8:] == 9).all()


def test_an_empty_batch_needs_no_computation() -> None:
    assert zf.convolution(torch.zeros(0, 3, 8, 8), randn(4, 3, 3, 3)).shape == (0, 4, 6, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": randn(4, 5, 3, 3)}, "src with 5 channels"),
        ({"weights": randn(4, 3, 3)}, "4 dimensions"),
        ({"bias": randn(5)}, r"bias must have shape \[4\]"),
        ({"groups": 2}, "groups"),
        ({"groups": 0}, "groups must be at least 1"),
        ({"stride": 0}, "stride"),
        ({"stride": (1, 1, 1)}, "stride must have 2 values"),
        ({"padding": -1}, "padding"),
        ({"dilation": 9}, "reaches over 19"),
        ({"algorithm": "gemm"}, "direct, winograd, auto"),
        ({"src": randn(3, 8, 8)}, "weights must have 3 dimensions"),
        ({"src": randn(8, 8)}, "unsqueeze"),
        ({"src": torch.zeros(1, 0, 8, 8)}, "empty|channels"),
        ({"post_ops": [("eltwise", "nothing")]}, r"post_ops\[0\].*relu"),
        ({"post_ops": [("binary", "add", randn(3, 3))]}, "broadcast"),
        ({"post_ops": [("prelu", randn(3))]}, "1 or 4"),
        ({"post_ops": [("sum",)]}, "pass out"),
        ({"post_ops": [("eltwise", "relu")] * 33}, "at most 32"),
        ({"algorithm": ["direct"]}, "algorithm must be one of"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"src": randn(1, 3, 8, 8), "weights": randn(4, 3, 3, 3), **change}
    with pytest.raises(ValueError, match=message):
        zf.convolution(**arguments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kernel", "padding", "padding_r", "dilation"),
    [((1, 3), (0, 0), (1, 2), (2, 1)), ((1, 1), (1, 0), (1, 0), (1, 1)), ((3, 3), (4, 1), (0, 1), (1, 1))],
)
@pytest.mark.parametrize("chain", ["relu, sum", "sub", "mul, sum"])
def test_post_ops_where_windows_lie_wholly_in_padding(
    dtype: torch.dtype, kernel: Any, padding: Any, padding_r: Any, dilation: Any, chain: str
) -> None:
    """There the library computed post-ops wrongly, or ended the process."""
    x, w = randn(2, 3, 4, 5, dtype=dtype), randn(16, 3, *kernel, dtype=dtype)
    padded = F.pad(x.double(), (padding[1], padding_r[1], padding[0], padding_r[0]))
    expected = F.conv2d(padded, w.double(), dilation=dilation)
    other, out = randn(2, 16, expected.shape[2], 1), randn(*expected.shape, dtype=dtype)
    before = out.double().clone()
    post_ops, expected = {
        "relu, sum": ([("eltwise", "relu"), ("sum",)], expected.relu() + before),
        "sub": ([("binary", "sub", other)], expected - other.double()),
        "mul, sum": ([("binary", "mul", other), ("sum", 0.5)], expected * other.double() + 0.5 * before),
    }[chain]
    result = zf.convolution(x, w, padding=padding, padding_r=padding_r, dilation=dilation, post_ops=post_ops, out=out)
    assert_close(result, expected, k=27)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["add", "mul", "div"])
def test_a_whole_operand_that_lies_otherwise(dtype: torch.dtype, kind: str) -> None:
    """The implementation that takes most layouts read it as if it lay as the result does."""
    x, w = randn(2, 3, 5, 4, dtype=dtype), randn(6, 1, 2, 3, dtype=dtype)
    plain = F.conv2d(x.double(), w.double(), groups=3, dilation=(2, 1), stride=(1, 2), padding=(0, 2))
    other = randn(*plain.shape).abs() + 0.5
    expected = {"add": torch.add, "mul": torch.mul, "div": torch.div}[kind](plain, other.double())
    for algorithm in ("direct", "auto"):
        result = zf.convolution(
            x,
            w,
            groups=3,
            dilation=(2, 1),
            stride=(1, 2),
            padding=(0, 2),
            algorithm=algorithm,
            post_ops=[("binary", kind, other)],
        )
        assert_close(result, expected, k=6)
