"""inner_product and matmul against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.tolerance import assert_close
from tests.zendnn_cffi.functional.support import DTYPES, dtypes, few, hold, randn, ways
from zendnn_cffi import functional as zf
from zendnn_cffi.primitives.attributes import BINARY

SIZES = st.sampled_from([1, 2, 3, 7, 16, 33, 64])
ELTWISE = {
    "relu": (lambda x, a, b: F.leaky_relu(x, a), 0.1, 0.0),
    "swish": (lambda x, a, b: x * torch.sigmoid(a * x), 1.7, 0.0),
    "gelu_erf": (lambda x, a, b: F.gelu(x), 0.0, 0.0),
    "elu": (lambda x, a, b: F.elu(x, a), 0.7, 0.0),
    "linear": (lambda x, a, b: a * x + b, 2.0, -1.0),
    "tanh": (lambda x, a, b: torch.tanh(x), 0.0, 0.0),
}
TORCH_BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "max": torch.maximum,
    "min": torch.minimum,
    "ge": torch.ge,
    "gt": torch.gt,
    "le": torch.le,
    "lt": torch.lt,
    "eq": torch.eq,
    "ne": torch.ne,
}


@st.composite
def chains(draw: Any) -> list[tuple[Any, ...]]:
    chain: list[tuple[Any, ...]] = []
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from([*ELTWISE, "add", "sub", "mul", "max"]))
        if kind in ELTWISE:
            chain.append(("eltwise", kind, *ELTWISE[kind][1:], draw(st.sampled_from([1.0, 1.0, 0.5]))))
        else:
            chain.append(("binary", kind, draw(st.sampled_from(["full", "row", "column", "one"]))))
    return chain


def with_operands(chain: list[tuple[Any, ...]], shape: tuple[int, ...], dtype: torch.dtype) -> list[tuple[Any, ...]]:
    m, n = shape[-2:]
    sizes = {"full": (m, n), "row": (1, n), "column": (m, 1), "one": (1, 1)}
    return [
        (name, kind, randn(*sizes[rest[0]], dtype=dtype)) if name == "binary" else (name, kind, *rest)
        for name, kind, *rest in chain
    ]


def chained(result: torch.Tensor, chain: list[tuple[Any, ...]]) -> torch.Tensor:
    for name, kind, *rest in chain:
        if name == "binary":
            result = TORCH_BINARY[kind](result, rest[0].double())
        else:
            alpha, beta, scale = rest
            result = scale * ELTWISE[kind][0](result, alpha, beta)
    return result


@few
@given(SIZES, SIZES, SIZES, dtypes, ways, ways, st.booleans(), chains())
def test_matmul_2d(m: int, k: int, n: int, dtype: torch.dtype, way_a: str, way_b: str, bias: bool, chain: Any) -> None:
    a, b = hold(randn(m, k, dtype=dtype), way_a), hold(randn(k, n, dtype=dtype), way_b)
    c = torch.randn(n) if bias else None
    post_ops = with_operands(chain, (m, n), dtype)
    plain = a.double() @ b.double() + (0 if c is None else c.double())
    expected = chained(plain, post_ops)
    scale = 4 * max(plain.abs().max().item(), expected.abs().max().item(), 1.0)  # products of the chain amplify
    assert_close(zf.matmul(a, b, c, post_ops=post_ops), expected, k=k, scale=scale)


@few
@given(SIZES, SIZES, SIZES, dtypes, ways, ways, st.booleans(), chains())
def test_inner_product(
    m: int, k: int, n: int, dtype: torch.dtype, way_a: str, way_b: str, bias: bool, chain: Any
) -> None:
    x, w = hold(randn(m, k, dtype=dtype), way_a), hold(randn(n, k, dtype=dtype), way_b)
    c = torch.randn(n) if bias else None
    post_ops = with_operands(chain, (m, n), dtype)
    plain = F.linear(x.double(), w.double(), None if c is None else c.double())
    expected = chained(plain, post_ops)
    scale = 4 * max(plain.abs().max().item(), expected.abs().max().item(), 1.0)
    assert_close(zf.inner_product(x, w, c, post_ops=post_ops), expected, k=k, scale=scale)


@pytest.mark.parametrize("kind", BINARY)
@pytest.mark.parametrize("function", [zf.matmul, zf.inner_product])
def test_every_binary_post_op(function: Any, kind: str) -> None:
    a, b, other = randn(7, 16), randn(16, 16), torch.rand(7, 16) + 0.5
    expected = TORCH_BINARY[kind](
        (a.double() @ (b if function is zf.matmul else b.t()).double()), other.double()
    ).double()
    assert_close(function(a, b, post_ops=[("binary", kind, other)]), expected, k=16)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("shape", ["full", "row", "column", "one"])
@pytest.mark.parametrize("function", [zf.matmul, zf.inner_product])
def test_every_broadcast_of_a_binary_post_op(function: Any, shape: str, rows: int) -> None:
    sizes = {"full": (rows, 32), "row": (1, 32), "column": (rows, 1), "one": (1, 1)}[shape]
    a, b, other = randn(rows, 16), randn(16, 32), randn(*sizes)
    expected = a.double() @ b.double() + other.double()
    weights = b if function is zf.matmul else b.t().contiguous()
    assert_close(function(a, weights, post_ops=[("binary", "add", other)]), expected, k=16)


@pytest.mark.parametrize("function", [zf.matmul, zf.inner_product])
@pytest.mark.parametrize("scales", [(2.0, 0.5), (1.0, 1.0), (3.0, 3.0)])
@pytest.mark.parametrize("between", [[], [("eltwise", "relu")]])
def test_every_sum_post_op_counts(function: Any, scales: tuple[float, float], between: list[Any]) -> None:
    x, w, held = randn(5, 16), randn(16, 16), randn(5, 16)
    expected = x.double() @ (w if function is zf.matmul else w.t()).double() + scales[0] * held.double()
    expected = (expected.relu() if between else expected) + scales[1] * held.double()
    out = held.clone()
    function(x, w, post_ops=[("sum", scales[0]), *between, ("sum", scales[1])], out=out)
    assert_close(out, expected, k=16)


@pytest.mark.parametrize(("function", "name"), [(zf.matmul, "matmul"), (zf.inner_product, "inner_product")])
def test_prelu_is_refused_by_name(function: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"post_ops\[1\] is a prelu, which {name} cannot execute"):
        function(randn(3, 4), randn(4, 4), post_ops=[("eltwise", "tanh"), ("prelu", torch.ones(4))])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 3, 5, 7), (7, 4)),
        ((3, 5, 7), (3, 7, 4)),
        ((2, 1, 5, 7), (3, 7, 4)),
        ((1, 5, 7), (3, 7, 4)),
        ((7,), (7, 4)),
        ((5, 7), (7,)),
        ((7,), (7,)),
        ((2, 5, 7), (7,)),
        ((7,), (2, 7, 4)),
        ((1, 1), (1, 1)),
        ((2, 2, 2, 3, 7), (2, 2, 2, 7, 4)),
    ],
)
def test_matmul_broadcasts_as_torch_does(a: Any, b: Any, dtype: torch.dtype) -> None:
    x, y = randn(*a, dtype=dtype), randn(*b, dtype=dtype)
    expected = x.double() @ y.double()
    assert_close(zf.matmul(x, y), expected, k=7)
    out = torch.empty(expected.shape, dtype=dtype)
    assert zf.matmul(x, y, out=out) is out
    assert_close(out, expected, k=7)


def test_bias_broadcasts_to_the_result() -> None:
    a, b = randn(2, 5, 7), randn(2, 7, 4)
    for shape in ((4,), (5, 1), (2, 1, 4), (2, 5, 4), (1,), ()):
        bias = randn(*shape)
        assert_close(zf.matmul(a, b, bias), a.double() @ b.double() + bias.double(), k=7)
    assert_close(zf.matmul(a[0, 0], b[0], bias := randn(4)), a[0, 0].double() @ b[0].double() + bias.double(), k=7)


def test_leading_dimensions_of_a_linear() -> None:
    x, w, b = randn(2, 3, 7), randn(4, 7), randn(4)
    assert_close(zf.inner_product(x, w, b), F.linear(x.double(), w.double(), b.double()), k=7)
    assert_close(zf.inner_product(x[0, 0], w, b), F.linear(x[0, 0].double(), w.double(), b.double()), k=7)


def test_sum_reads_a_strided_output() -> None:
    a, b = randn(5, 7), randn(7, 4)
    wide = randn(5, 9)
    expected = a.double() @ b.double() + wide[:, 2:6].double()
    rest = wide[:, [0, 1, 6, 7, 8]].clone()
    zf.matmul(a, b, out=wide[:, 2:6], post_ops=[("sum",)])
    assert_close(wide[:, 2:6], expected, k=7)
    assert torch.equal(wide[:, [0, 1, 6, 7, 8]], rest)


def test_changed_weights_are_read_anew() -> None:
    x, w = randn(5, 64), randn(48, 64)
    for _ in range(3):
        assert_close(zf.inner_product(x, w), F.linear(x.double(), w.double()), k=64)
        assert_close(zf.matmul(x, w.t()), F.linear(x.double(), w.double()), k=64)
        w += 1


def test_empty_results() -> None:
    assert zf.matmul(torch.zeros(0, 5), randn(5, 4)).shape == (0, 4)
    assert zf.inner_product(torch.zeros(0, 5), randn(4, 5)).shape == (0, 4)
    for call in (
        lambda: zf.matmul(torch.zeros(3, 0), torch.zeros(0, 4)),
        lambda: zf.inner_product(torch.zeros(3, 0), torch.zeros(4, 0)),
    ):
        with pytest.raises(ValueError, match="nothing to multiply"):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zf.matmul(randn(3, 4), randn(5, 6)), "K = 4.*b 5"),
        (lambda: zf.matmul(randn(2, 3, 4), randn(3, 4, 5)), "batch dim 0"),
        (lambda: zf.matmul(torch.tensor(1.0), randn(3)), "at least one dimension"),
        (lambda: zf.matmul(randn(3, 4), randn(4, 5), randn(4)), "bias"),
        (lambda: zf.inner_product(randn(3, 4), randn(4, 5)), "K = 4"),
        (lambda: zf.inner_product(randn(3, 4), randn(5)), r"weights \[O, K\]"),
        (lambda: zf.inner_product(randn(3, 4), randn(5, 4), randn(4)), r"bias must have shape \[5\]"),
        (lambda: zf.matmul(randn(3, 4), randn(4, 5), out=torch.zeros(3, 4)), r"out must have shape \[3, 5\]"),
        (lambda: zf.matmul(randn(3, 4), randn(4, 5), post_ops="relu"), "post_ops"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_an_implementation_that_cannot_be_created_is_passed_over() -> None:
    """The library chose a kernel for a comparison with one number per row that it then failed to make."""
    a, b, column = randn(1, 5, 1), randn(1, 1, 3), randn(5, 1)
    result = zf.matmul(a, b, post_ops=[("binary", "ne", column)])
    assert torch.equal(result, (a @ b != column).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ("sub", "max"))
def test_a_result_whose_size_1_dimension_has_the_longest_stride(kind: str, dtype: torch.dtype) -> None:
    """The library's gemm:jit ended the process with a binary post-op there."""
    a, b, c = torch.randn(2, 1, 3).to(dtype), torch.randn(2, 6, 16).to(dtype)[:, ::2], torch.randn(1, 16)
    out = torch.zeros(64, dtype=dtype).as_strided((2, 1, 16), (17, 34, 1))
    zf.matmul(a, b, post_ops=[("binary", kind, c)], out=out)
    product = a.double() @ b.double()
    expected = product - c if kind == "sub" else torch.maximum(product, c.double())
    torch.testing.assert_close(out.double(), expected, atol=3e-2, rtol=2e-2)
