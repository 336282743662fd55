"""Element-wise operations that nothing absorbs: eltwise, binary, prelu."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from tests.fx_passes.lower.windows.test_convolution import BINARY, ELTWISE
from tests.support.lowering import kinds, net, noise, offload

DTYPES = (None, torch.bfloat16)
POOL = nn.MaxPool2d(2)  # something with blocked layouts that absorbs nothing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ELTWISE)
def test_eltwise(name: str, dtype: torch.dtype | None) -> None:
    model = net(lambda m, x: m[1](ELTWISE[name](m[0](x))), POOL, nn.Conv2d(17, 4, 1))
    found = offload(model, noise(2, 17, 8, 7), dtype=dtype)
    assert set(kinds(found)[1:-1]) == {"eltwise"} and not any("ref" in n.implementation for n in found.nodes)


@pytest.mark.parametrize("name", ("sqrt", "pow"))
def test_positive(name: str) -> None:
    function = {"sqrt": torch.sqrt, "pow": lambda x: torch.pow(x, 3)}[name]
    found = offload(net(lambda m, x: m[0](function(torch.abs(x) + 0.5)), POOL), noise(2, 17, 8, 7), k=16)
    assert "torch" not in kinds(found)


BY_PYTORCH: dict[str, Any] = {
    "sin": torch.sin,
    "cos": torch.Tensor.cos,
    "erf": torch.special.erf,
    "expm1": torch.expm1,
    "log1p": lambda x: torch.log1p(x.abs()),
    "reciprocal": lambda x: torch.reciprocal(x.abs() + 0.5),
    "selu": F.selu,
    "selu in place": lambda x: F.selu(x, True),
    "softsign": F.softsign,
}


@pytest.mark.parametrize("dtype", (None, torch.float16), ids=str)
@pytest.mark.parametrize("name", BY_PYTORCH)
def test_functions_of_pytorch_are_inside_of_regions(name: str, dtype: torch.dtype | None) -> None:
    model = net(lambda m, x: m[1](BY_PYTORCH[name](m[0](x))), nn.Linear(24, 40), nn.Linear(40, 24)).to(dtype)
    found = offload(model, noise(5, 24).to(dtype))
    computed = [node for node in found.nodes if node.became in ("inner_product", "torch")]
    assert [node.became for node in computed] == ["inner_product", "torch", "inner_product"]
    assert computed[1].reason.startswith("no primitive computes")


SMALL: dict[str, tuple[Any, torch.Tensor]] = {
    "log": (torch.log, 1 + torch.linspace(-0.99, 1, 408) ** 5),
    "softplus": (F.softplus, torch.linspace(-60, 20, 408)),
    "logsigmoid": (F.logsigmoid, torch.linspace(-20, 60, 408)),
}


@pytest.mark.parametrize("tune", ("off", "full"))
@pytest.mark.parametrize("name", SMALL)
def test_small_results_keep_their_digits_and_their_sign(name: str, tune: str) -> None:
    """The library's are off by 1e-6 and more: a scale by softplus was 0 or negative. PyTorch computes them."""
    function, numbers = SMALL[name]
    layer = nn.Linear(8, 8, bias=False)
    layer.weight.data.copy_(torch.eye(8))
    model, x = net(lambda m, x: function(m[0](x)), layer), numbers.reshape(51, 8)
    fast = zendnn_cffi.optimize(model, (x,), tune=tune)
    with torch.no_grad():
        ours, expected = fast(x), function(x.double())
    assert ((ours - expected).abs() <= 1e-6 * expected.abs()).all()
    assert torch.equal(ours.sign(), expected.sign().float())
    if tune == "off":  # else by what was faster
        assert "inner_product" in kinds(zendnn_cffi.explain(fast))


@pytest.mark.parametrize(
    "shape", ((7,), (3, 5), (2, 3, 4), (2, 17, 3, 2), (1, 3, 2, 2, 2), (2, 1, 3, 1, 2, 2)), ids=str
)
def test_ranks(shape: tuple[int, ...]) -> None:
    found = offload(
        net(lambda m, x, y: torch.tanh(x) * y - 1, nn.Identity()), noise(*shape), noise(*shape, seed=1), k=4
    )
    assert kinds(found) == ["eltwise", "binary", "eltwise"]


def test_scalars_stay_right() -> None:
    """A value without dimensions."""
    offload(net(lambda m, x: F.relu(m[0](x)) * torch.tanh(x.mean((0, 1, 2, 3))), POOL), noise(2, 3, 4, 4), k=96)
    offload(net(lambda m, x, y: torch.tanh(y) + m[0](x), POOL), noise(2, 3, 4, 4), torch.tensor(0.5), k=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str, dtype: torch.dtype | None) -> None:
    model = net(lambda m, x, y: m[1](BINARY[name](m[0](x), m[0](y))), POOL, nn.Conv2d(17, 4, 1))
    found = offload(model, noise(2, 17, 8, 8), noise(2, 17, 8, 8, seed=1), dtype=dtype)
    assert "torch" not in kinds(found)


@pytest.mark.parametrize("name", ("add", "sub", "rsub", "div"))
@pytest.mark.parametrize("shape", ((1, 17, 1, 1), (17, 1, 1), (2, 17, 1, 1), (1, 1, 4, 4), (4, 4), (), (1, 17, 4, 4)),
                         ids=str)  # fmt: skip
def test_broadcast(name: str, shape: tuple[int, ...]) -> None:
    model = net(lambda m, x, y: m[1](BINARY[name](m[0](x), y)), POOL, nn.Conv2d(17, 4, 1))
    found = offload(model, noise(2, 17, 8, 8), noise(*shape))
    assert found.nodes[-1].became == "convolution"


def test_both_sides_broadcast() -> None:
    found = offload(net(lambda m, x, y: m[0](x) + y, nn.Conv2d(3, 17, 1)), noise(2, 3, 1, 7), noise(17, 5, 1))
    assert "convolution" in kinds(found)


@pytest.mark.parametrize("function", (operator.add, operator.mul, operator.sub))
def test_one_tensor_twice(function: Any) -> None:
    for fn in (lambda m, x: m[1](function(m[0](x), m[0](x))), lambda m, x: (lambda a: m[1](function(a, a)))(m[0](x))):
        assert "torch" not in kinds(offload(net(fn, POOL, nn.Conv2d(17, 4, 1)), noise(2, 17, 8, 8)))


def test_transposed_operand() -> None:
    found = offload(
        net(lambda m, x: (lambda a: a + a.transpose(2, 3))(m[0](x)), nn.Conv2d(3, 17, 1)), noise(2, 3, 5, 5)
    )
    assert "torch" not in kinds(found)


def test_integers_and_bools_keep_their_meaning() -> None:
    model = net(lambda m, x, y: m[0](x) * (y + 1) / 2, nn.Conv2d(3, 17, 1))
    found = offload(model, noise(2, 3, 5, 5), torch.arange(5))
    assert "convolution" in kinds(found)
    offload(net(lambda m, x, y: m[0](x) + y, nn.Conv2d(3, 17, 1)), noise(2, 3, 5, 5), torch.arange(5) > 2)


def test_promotion() -> None:
    """f32 with f64, bf16 with f32: the result's dtype is eager's."""
    for dtype in (torch.float64, torch.bfloat16):
        offload(net(lambda m, x, y: F.relu(m[0](x) + y), nn.Conv2d(3, 17, 1)), noise(2, 3, 5, 5),
                noise(1, 17, 1, 1, dtype=dtype))  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slopes", (1, 17))
@pytest.mark.parametrize("shape", ((2, 17), (2, 17, 5), (2, 17, 4, 3), (1, 17, 2, 2, 3)), ids=str)
def test_prelu(shape: tuple[int, ...], slopes: int, dtype: torch.dtype | None) -> None:
    prelu = nn.PReLU(slopes)
    prelu.weight.data.copy_(noise(slopes))
    assert kinds(offload(net(lambda m, x: m[0](x), prelu), noise(*shape), dtype=dtype, k=4)) == ["prelu"]


def test_special_values() -> None:
    """Infinities and denormals go through as in PyTorch (NaN does not: the kernels' maximum drops it)."""
    x = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 1e30]).reshape(1, 6, 1, 1)
    for function in (F.relu, F.relu6, torch.exp, torch.abs, F.silu, F.hardsigmoid, torch.tanh, F.elu, F.softplus):
        offload(net(lambda m, x: function(x), nn.Identity()), x, k=4, scale=1.0)  # noqa: B023
