"""gemm and PackedWeights (AOCL-BLIS) against torch in float64."""

from __future__ import annotations

import copy
import importlib
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.tolerance import assert_close
from tests.zendnn_cffi.functional.support import few, hold, randn, ways
from zendnn_cffi import functional as zf
from zendnn_cffi.errors import UnsupportedError

SIZES = st.sampled_from([1, 2, 3, 7, 16, 33, 64, 70])
INT8 = [torch.uint8, torch.int8]
ELTWISE: dict[str, tuple[tuple[float, ...], Any]] = {
    "relu": ((0.1,), lambda x: F.leaky_relu(x, 0.1)),
    "gelu_erf": ((), F.gelu),
    "gelu_tanh": ((), lambda x: F.gelu(x, approximate="tanh")),
    "tanh": ((), torch.tanh),
    "logistic": ((), torch.sigmoid),
    "swish": ((1.7,), lambda x: x * torch.sigmoid(1.7 * x)),
    "clip": ((-0.5, 1.0), lambda x: x.clamp(-0.5, 1.0)),
}


def integers(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, (m, k), dtype=dtype)


@few
@given(
    SIZES,
    SIZES,
    SIZES,
    st.sampled_from([(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)]),
    ways,
    ways,
    st.booleans(),
    st.lists(st.sampled_from([*ELTWISE, "add", "mul", "scale"]), max_size=3),
    st.booleans(),
)
def test_floats(
    m: int, k: int, n: int, types: Any, way_a: str, way_b: str, bias: bool, chain: list[str], packed: bool
) -> None:
    src, dst = types
    a, b = hold(randn(m, k, dtype=src), way_a), hold(randn(k, n, dtype=src), way_b)
    c = torch.randn(n) if bias else None
    expected = a.double() @ b.double() + (0 if c is None else c.double())
    size, post_ops = max(expected.abs().max().item(), 1.0), []
    for kind in chain:
        if kind in ELTWISE:
            post_ops.append(("eltwise", kind, *ELTWISE[kind][0]))
            expected = ELTWISE[kind][1](expected)
        elif kind == "scale":
            scales = torch.rand(n)
            post_ops.append(("scale", scales, 2.0))
            expected = expected * scales.double() + 2
        else:
            other = hold(randn(m, n, dtype=src), way_a)
            post_ops.append(("binary", kind, other))
            expected = expected + other.double() if kind == "add" else expected * other.double()
        size = max(size, expected.abs().max().item())
    actual = zf.gemm(a, zf.PackedWeights(b) if packed else b, c, out_dtype=dst, post_ops=post_ops)
    assert actual.dtype == (dst or src)
    assert_close(actual, expected, k=k, scale=8 * size)


@pytest.mark.needs("vnni")
@few
@given(SIZES, SIZES, SIZES, st.sampled_from(INT8), ways, ways, st.booleans(), st.booleans())
def test_integers(m: int, k: int, n: int, src: torch.dtype, way_a: str, way_b: str, bias: bool, packed: bool) -> None:
    a, b = hold(integers(m, k, src), way_a), hold(integers(k, n, torch.int8), way_b)
    c = torch.randint(-500, 500, (n,), dtype=torch.int32) if bias else None
    sums = a.double() @ b.double() + (0 if c is None else c.double())
    weights = zf.PackedWeights(b, src_dtype=src) if packed else b
    assert torch.equal(zf.gemm(a, weights, c).double(), sums)
    scales, shift = torch.rand(n) * 1e-3, torch.randn(n)
    chain = [("scale", scales), ("bias", shift), ("eltwise", "relu")]
    expected = (sums * scales.double() + shift.double()).relu()
    for dst in (torch.float32, torch.bfloat16):
        assert_close(
            zf.gemm(a, weights, c, out_dtype=dst, post_ops=chain),
            expected,
            k=k,
            scale=sums.abs().max().item() * 1e-3 + 1,
        )
    for dst in INT8:
        info = torch.iinfo(dst)
        exact = (sums * scales.double()).round() + 5
        difference = zf.gemm(a, weights, c, out_dtype=dst, post_ops=[("scale", scales, 5)]).double() - exact.clamp(
            info.min, info.max
        )
        assert difference.abs().max() <= 1  # f32 and f64 may round a half to different sides


def test_alpha_and_beta() -> None:
    a, b, out = randn(5, 7), randn(7, 4), randn(5, 4)
    expected = 0.5 * (a.double() @ b.double()) + 2 * out.double()
    assert zf.gemm(a, b, alpha=0.5, beta=2, out=out) is out
    assert_close(out, expected, k=7)


@pytest.mark.needs("vnni")
def test_alpha_of_integers() -> None:
    x, w = integers(5, 7, torch.uint8), integers(7, 4, torch.int8)
    assert torch.equal(zf.gemm(x, w, alpha=3).double(), 3 * (x.double() @ w.double()))


def test_output_with_rows_or_columns_apart() -> None:
    a, b = randn(5, 7), randn(7, 4)
    for out in (torch.full((5, 9), 7.0)[:, 2:6], torch.full((4, 5), 7.0).t(), torch.full((5, 8), 7.0)[:, ::2]):
        zf.gemm(a, b, out=out)
        assert_close(out, a.double() @ b.double(), k=7)


def test_packed_weights_serve_many_products_and_threads() -> None:
    weights = randn(48, 64)
    packed = zf.PackedWeights(weights.t())
    weights_before = weights.clone()
    weights.zero_()  # nothing refers to the original
    assert (packed.k, packed.n, packed.dtype, packed.src_dtype) == (64, 48, torch.float32, torch.float32)
    sources = [randn(m, 64) for m in (1, 3, 17, 64)]
    results: dict[int, torch.Tensor] = {}
    threads = [
        threading.Thread(target=lambda i=i, x=x: results.update({i: zf.gemm(x, packed)})) for i, x in enumerate(sources)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, x in enumerate(sources):
        assert_close(results[i], x.double() @ weights_before.t().double(), k=64)
    for action in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="pack the weights again"):
            action(packed)


def test_a_refused_argument_never_reaches_blis(capfd: pytest.CaptureFixture[str]) -> None:
    for call, _ in REFUSED:
        with pytest.raises((TypeError, ValueError)):
            call()
    assert "libblis" not in capfd.readouterr().err


@pytest.mark.parametrize("slope", [0.01, 0.25, 1.0, 2.0])
@pytest.mark.parametrize("shape", [(5, 33, 17), (7, 5, 3), (64, 64, 64)])
def test_a_relu_of_any_slope_is_right(slope: float, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = randn(m, k), randn(k, n)
    y = a.double() @ b.double()
    assert_close(zf.gemm(a, b, post_ops=[("eltwise", "relu", slope)]), torch.where(y > 0, y, slope * y), k=k)


@pytest.mark.parametrize("slope", [-1e-6, -0.5, -2.0])
def test_a_relu_of_negative_slope_is_refused(slope: float) -> None:
    """Kernels negate positive numbers: without AVX-512 all of them, with it those of some rows and columns."""
    with pytest.raises(UnsupportedError, match="negative slope"):
        zf.gemm(randn(2, 3), randn(3, 4), post_ops=[("eltwise", "relu", slope)])


U8, S8 = torch.ones(2, 3, dtype=torch.uint8), torch.ones(3, 4, dtype=torch.int8)
REFUSED: list[tuple[Any, str]] = [
    (lambda: zf.gemm(randn(2, 3), randn(4, 5)), "K = 3"),
    (lambda: zf.gemm(randn(2, 3), randn(3)), r"b must be \[K, N\]"),
    (lambda: zf.gemm(randn(3), randn(3, 4)), r"a must be \[M, K\]"),
    (lambda: zf.gemm(randn(2, 3), S8), "b must be float32"),
    (lambda: zf.gemm(torch.zeros(2, 0), torch.zeros(0, 4)), "nothing to multiply"),
    (lambda: zf.gemm(randn(2, 3), randn(3, 4), randn(5)), r"bias must have shape \[4\]"),
    (lambda: zf.gemm(U8, S8, torch.zeros(4, dtype=torch.bfloat16)), "bias must be float32 or int32"),
    (lambda: zf.gemm(randn(2, 3), randn(3, 4), out_dtype=torch.int8), "out_dtype must be float32"),
    (lambda: zf.gemm(randn(2, 3), randn(3, 4), beta=1), "pass out"),
    (lambda: zf.gemm(U8, S8, alpha=0.5), "whole"),
    (lambda: zf.gemm(U8, S8, post_ops=[("scale", 0.5)]), "int32 result"),
    (lambda: zf.gemm(U8, S8, out_dtype=torch.int8, post_ops=[("scale", 0.5, 200)]), "from -128 to 127"),
    (lambda: zf.gemm(U8, S8, out_dtype=torch.int8, post_ops=[("scale", torch.ones(3))]), "one number or 4"),
    (lambda: zf.gemm(U8, S8, post_ops=[("eltwise", "clip", 0.0, 1.0)]), "float results only"),
    (lambda: zf.gemm(U8, S8, post_ops=[("eltwise", "relu", 0.1)]), "float results only"),
    (lambda: zf.gemm(randn(2, 3), randn(3, 4), post_ops=[("eltwise", "mish")]), "relu, gelu_tanh"),
    (lambda: zf.gemm(randn(2, 3), randn(3, 4), post_ops=[("eltwise", "clip")]), "bounds"),
    (lambda: zf.gemm(randn(2, 3), randn(3, 4), post_ops=[("eltwise", "swish")]), "alpha"),
    (lambda: zf.gemm(randn(2, 3), randn(3, 4), post_ops=[("binary", "sub", randn(2, 4))]), "'add' or 'mul'"),
    (lambda: zf.gemm(randn(2, 3), randn(3, 4), post_ops=[("binary", "add", randn(4))]), r"shape \[2, 4\]"),
    (lambda: zf.gemm(randn(2, 3), randn(3, 4), post_ops=[("eltwise", "relu")] * 9), "at most 8"),
    (lambda: zf.gemm(randn(2, 3), zf.PackedWeights(randn(5, 4))), "packed weights 5"),
    (lambda: zf.gemm(randn(2, 3), zf.PackedWeights(randn(3, 4).bfloat16())), "packed for bfloat16"),
    (lambda: zf.PackedWeights(torch.zeros(0, 4)), "not empty"),
    (lambda: zf.PackedWeights(randn(3, 4), src_dtype=torch.uint8), "src_dtype must be float32"),
    (lambda: zf.PackedWeights(U8), "weights must be"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_out_must_be_apart_from_the_operands() -> None:
    square = randn(4, 4)
    for call in (
        lambda: zf.gemm(square, randn(4, 4), out=square),
        lambda: zf.gemm(randn(4, 4), square, out=square.t()),
        lambda: zf.gemm(randn(4, 4), randn(4, 4), post_ops=[("binary", "add", square)], out=square),
    ):
        with pytest.raises(ValueError, match="shares memory"):
            call()


INTEGERS = (torch.int8, torch.uint8, torch.int32)


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("src", [torch.uint8, torch.int8])
def test_sums_that_may_pass_32_bits_are_refused(src: torch.dtype) -> None:
    """They wrap without a word. A long K with small numbers is no trouble."""
    k = 140_000
    a, b = torch.full((2, k), torch.iinfo(src).max, dtype=src), torch.full((k, 3), -128, dtype=torch.int8)
    for weights in (b, zf.PackedWeights(b, src_dtype=src)):
        with pytest.raises(ValueError, match="a and b may give sums up to .* wrap at 2147483648: split K"):
            zf.gemm(a, weights)
    small = torch.ones(k, 3, dtype=torch.int8)
    assert torch.equal(zf.gemm(a // 64, small).double(), (a // 64).double() @ small.double())
    a, b = torch.full((2, 100), 127, dtype=src), torch.full((100, 3), 127, dtype=torch.int8)
    with pytest.raises(ValueError, match="in place of alpha"):
        zf.gemm(a, b, alpha=2000)
    with pytest.raises(ValueError, match=r"beta \* out and the product may reach"):
        zf.gemm(a, b, beta=2, out=torch.full((2, 3), 2**30, dtype=torch.int32))
    with pytest.raises(ValueError, match="beta is for float32 results of float a and int32 results of 8-bit a"):
        zf.gemm(a, b, beta=1, out=torch.full((2, 3), 0.5))


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("result", INTEGERS)
@pytest.mark.parametrize("factor", [0.01, 1e3, 1e6, -1e6, 1e30, float("inf")])
def test_integer_results_are_saturated_however_large(result: torch.dtype, factor: float) -> None:
    """Numbers beyond 32 bits became the smallest one, whatever their sign."""
    a = torch.randint(0, 255, (4, 50), dtype=torch.uint8)
    b = torch.randint(1, 127, (50, 6), dtype=torch.int8)
    b[:, 3:] *= -1
    limits = torch.iinfo(result)
    exact = a.double() @ b.double()
    post_ops: list[Any] = [("binary", "mul", torch.full((4, 6), factor)), ("eltwise", "relu")]
    for chain, expected in ((post_ops[:1], exact * factor), (post_ops, (exact * factor).relu())):
        got = zf.gemm(a, b, post_ops=chain, out_dtype=result).double()
        expected = expected.clamp(limits.min, limits.max)
        assert ((got - expected).abs() <= 1 + 1e-6 * expected.abs()).all()
    if result != torch.int32:
        got = zf.gemm(a, b, post_ops=[("scale", factor, 3)], out_dtype=result).double()
        expected = (exact * factor + 3).clamp(limits.min, limits.max)
        assert ((got - expected).abs() <= 1).all()


def test_integers_need_vnni(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """BLIS says so on stderr, and leaves the result as it was."""
    module = importlib.import_module("zendnn_cffi.functional.gemm")  # the package has the function under that name
    monkeypatch.setattr(module, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    for call in (lambda: zf.gemm(U8, S8), lambda: zf.gemm(S8.t(), S8), lambda: zf.PackedWeights(S8)):
        with pytest.raises(UnsupportedError, match="AVX512_VNNI"):
            call()
    assert torch.equal(zf.gemm(torch.ones(2, 3), torch.ones(3, 4)), torch.full((2, 4), 3.0))
    assert "libblis" not in capfd.readouterr().err


@pytest.mark.needs("vnni")
def test_int32_results_are_those_of_float32() -> None:
    """Documented: they have passed through float32."""
    a, b = torch.full((3, 4096), 127, dtype=torch.uint8), torch.full((4096, 5), 127, dtype=torch.int8)
    a[:, 0] -= 1
    exact = a.double() @ b.double()
    assert torch.equal(zf.gemm(a, b).float(), exact.float()) and exact.max() > 2**24
    assert torch.equal(zf.gemm(a[:, :1000], b[:1000]).double(), a[:, :1000].double() @ b[:1000].double())
