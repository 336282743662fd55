"""eltwise, binary, softmax, log_softmax, prelu against torch in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.tolerance import assert_close
from tests.zendnn_cffi.functional.support import DTYPES, dtypes, few, hold, randn, ways
from zendnn_cffi import functional as zf
from zendnn_cffi.engine.library import load
from zendnn_cffi.primitives.attributes import BINARY, COMPARISONS, ELTWISE

# kind -> (alpha, beta, oracle); the sources of some must be positive
KINDS: dict[str, tuple[float, float, Any]] = {
    "relu": (0.1, 0.0, lambda x: F.leaky_relu(x, 0.1)),
    "tanh": (0.0, 0.0, torch.tanh),
    "gelu_erf": (0.0, 0.0, F.gelu),
    "gelu_tanh": (0.0, 0.0, lambda x: F.gelu(x, approximate="tanh")),
    "elu": (0.7, 0.0, lambda x: F.elu(x, 0.7)),
    "square": (0.0, 0.0, torch.square),
    "abs": (0.0, 0.0, torch.abs),
    "sqrt": (0.0, 0.0, torch.sqrt),
    "linear": (2.0, -3.0, lambda x: 2 * x - 3),
    "bounded_relu": (1.5, 0.0, lambda x: x.clamp(0, 1.5)),
    "soft_relu": (0.0, 0.0, F.softplus),
    "logsigmoid": (0.0, 0.0, F.logsigmoid),
    "mish": (0.0, 0.0, F.mish),
    "logistic": (0.0, 0.0, torch.sigmoid),
    "exp": (0.0, 0.0, torch.exp),
    "log": (0.0, 0.0, torch.log),
    "swish": (1.7, 0.0, lambda x: x * torch.sigmoid(1.7 * x)),
    "clip": (-0.5, 1.0, lambda x: x.clamp(-0.5, 1.0)),
    "clip_v2": (-0.5, 1.0, lambda x: x.clamp(-0.5, 1.0)),
    "pow": (2.0, 1.5, lambda x: 2 * x**1.5),
    "round": (0.0, 0.0, torch.round),
    "hardswish": (0.0, 0.0, F.hardswish),
    "hardsigmoid": (0.0, 0.0, F.hardsigmoid),
}
POSITIVE = {"sqrt", "log", "pow"}
ORACLES = {
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

shapes = st.lists(st.sampled_from([1, 2, 3, 5, 17, 33]), min_size=0, max_size=4).map(tuple)


def test_every_kind_has_an_oracle() -> None:
    assert KINDS.keys() == {*ELTWISE, "hardsigmoid"}
    assert ORACLES.keys() == BINARY.keys()


@pytest.mark.parametrize("way", ["contiguous", "channels_last", "slice"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_eltwise_kind(kind: str, dtype: torch.dtype, way: str) -> None:
    alpha, beta, oracle = KINDS[kind]
    x = hold(((torch.rand(2, 5, 7, 3) + 0.1) if kind in POSITIVE else randn(2, 5, 7, 3) * 2).to(dtype), way)
    assert_close(zf.eltwise(x, kind, alpha, beta), oracle(x.double()), k=64)  # kernels approximate with polynomials
    same = x.clone()
    assert zf.eltwise(same, kind, alpha, beta, out=same) is same
    assert_close(same, oracle(x.double()), k=64)


@few
@given(shapes, dtypes, ways)
def test_eltwise_keeps_shape_and_order(shape: tuple[int, ...], dtype: torch.dtype, way: str) -> None:
    x = hold(randn(*shape, dtype=dtype), way)
    result = zf.eltwise(x, "relu")
    assert torch.equal(result, x.relu()) and result.stride() == torch.empty_like(x).stride()


@few
@given(shapes, st.randoms(use_true_random=False), st.sampled_from(list(BINARY)), dtypes, ways, ways)
def test_binary_broadcasts_as_torch_does(
    shape: tuple[int, ...], random: Any, kind: str, dtype: torch.dtype, way_a: str, way_b: str
) -> None:
    def part() -> torch.Tensor:
        return randn(*(n if random.random() < 0.7 else 1 for n in shape[random.randint(0, len(shape)) :]), dtype=dtype)

    a, b = hold(part(), way_a), hold(part(), way_b)
    if kind == "div":
        b = b.abs() + 0.5
    expected = ORACLES[kind](a.double(), b.double()).double()
    assert_close(zf.binary(a, b, kind), expected, dtype=dtype)


@pytest.mark.parametrize("kind", ["add", "sub", "mul", "max", *sorted(COMPARISONS)])
def test_numbers_as_operands(kind: str) -> None:
    x = randn(2, 3, 4)
    number = torch.tensor(0.5, dtype=torch.float64)
    assert_close(zf.binary(x, 0.5, kind), ORACLES[kind](x.double(), number).double(), dtype=torch.float32)
    assert_close(zf.binary(0.5, x, kind), ORACLES[kind](number, x.double()).double(), dtype=torch.float32)


@pytest.mark.parametrize(
    "shape", [(3, 4, 1), (3, 4, 1, 1), (2, 17, 1, 1, 1), (1, 4, 1, 1), (3, 4, 2, 1), (3, 4)], ids=str
)
@pytest.mark.parametrize("varies", [(0,), (1,), (0, 1), ()], ids=str)
def test_binary_post_ops_of_images_of_one_pixel(shape: tuple[int, ...], varies: tuple[int, ...]) -> None:
    """The generated kernel takes one number per channel for one per sample there."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    other = torch.randn([n if dim in varies else 1 for dim, n in enumerate(shape)], generator=generator)
    assert_close(zf.binary(x, x, "add", post_ops=[("binary", "mul", other)]), (x + x) * other)


def test_binary_in_place_mixed_types_and_post_ops() -> None:
    a, b, c = randn(2, 5, 7), randn(2, 5, 7, dtype=torch.bfloat16), randn(5, 1)
    expected = (a.double() + b.double()).relu() * c.double()
    assert_close(zf.binary(a, b, "add", post_ops=[("eltwise", "relu"), ("binary", "mul", c)]), expected)
    expected = a.double() + b.double()
    assert zf.binary(a, b, "add", out=a) is a
    assert_close(a, expected)


@few
@given(shapes.filter(bool), dtypes, ways, st.integers(-4, 3), st.booleans())
def test_softmax(shape: tuple[int, ...], dtype: torch.dtype, way: str, dim: int, log: bool) -> None:
    dim = dim % len(shape) - (len(shape) if dim < 0 else 0)
    x = hold(randn(*shape, dtype=dtype) * 3, way)
    actual = (zf.log_softmax if log else zf.softmax)(x, dim)
    expected = (torch.log_softmax if log else torch.softmax)(x.double(), dim)
    size = max(1.0, expected.abs().max().item())
    if log and not load().runs("cpu_isa_avx512_core"):
        size *= 2  # the logarithm of the kernels for AVX2 is off by up to 3.4e-6
    assert_close(actual, expected, k=shape[dim], scale=size)


def test_softmax_of_large_values_does_not_overflow() -> None:
    assert_close(
        zf.softmax(torch.tensor([[1e4, 1e4 - 1, -1e4]]), 1), torch.tensor([[1e4, 1e4 - 1, -1e4]]).double().softmax(1)
    )


@few
@given(st.lists(st.sampled_from([1, 2, 3, 16, 17]), min_size=1, max_size=5).map(tuple), dtypes, ways, st.booleans())
def test_prelu(shape: tuple[int, ...], dtype: torch.dtype, way: str, per_channel: bool) -> None:
    x = hold(randn(*shape, dtype=dtype), way)
    weight = randn(shape[1] if per_channel and len(shape) > 1 else 1, dtype=dtype)
    assert_close(zf.prelu(x, weight), F.prelu(x.double(), weight.double()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zf.eltwise(randn(2), "nothing"), "relu"),
        (lambda: zf.eltwise(randn(2), None), "relu"),
        (lambda: zf.eltwise(randn(2), "relu", "x"), "alpha must be a number"),
        (lambda: zf.binary(randn(2, 3), randn(4), "add"), "do not broadcast"),
        (lambda: zf.binary(1.0, 2.0, "add"), "both numbers"),
        (lambda: zf.binary(randn(2), randn(2), "plus"), "add"),
        (lambda: zf.softmax(randn(2, 3), 2), "dim must be at most 1"),
        (lambda: zf.softmax(torch.tensor(1.0), 0), "at least one dimension"),
        (lambda: zf.prelu(randn(2, 3), randn(2)), "1 or 3 elements"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize("shape", [(5,), (1,), (100,), (2, 3), (2, 1, 3, 2, 2, 4), ()])
@pytest.mark.parametrize("dtype", DTYPES)
def test_hardsigmoid_in_every_rank(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """As a post-op of linear it wrote nothing in one dimension, and ended the process in six."""
    x = randn(*shape, dtype=dtype)
    expected = F.hardsigmoid(x.double())
    assert_close(zf.eltwise(x, "hardsigmoid"), expected, scale=1.0)
    assert_close(zf.eltwise(x, "hardsigmoid", out=x), expected, scale=1.0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_prelu_in_every_order_of_dimensions(order: tuple[int, ...]) -> None:
    """Where neither rows nor channels are innermost, weights of other channels were read."""
    shape, weight = (3, 5, 2, 7), randn(5)
    x = randn(*(shape[i] for i in order)).permute([order.index(i) for i in range(4)])
    assert x.shape == shape
    assert_close(zf.prelu(x, weight), F.prelu(x.double(), weight.double()))


def test_binary_with_a_prelu_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"post_ops\[0\] is a prelu, which binary cannot execute"):
        zf.binary(randn(2, 3), 2.0, "mul", post_ops=[("prelu", randn(3))])
