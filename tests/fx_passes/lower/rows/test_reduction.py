"""Reductions behind convolutions: equal to eager, and what they became."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from tests.support.lowering import behind_convolution, kinds, net, noise, offload, relative_error


@pytest.mark.parametrize("keepdim", (False, True))
@pytest.mark.parametrize("dims", ((1, 2, 3), (3,), (2, 3), (-1, -2)))
@pytest.mark.parametrize("name", ("mean", "sum"))
def test_reductions(name: str, dims: tuple[int, ...], keepdim: bool) -> None:
    found = offload(
        behind_convolution(lambda y: getattr(torch, name)(y, dims, keepdim=keepdim)), noise(2, 3, 6, 5), scale=20.0
    )
    assert kinds(found)[1] in ("reduction", "pooling")


@pytest.mark.parametrize("dims", ((1, 2, 3), (3,), (2, 3), (-1, -2), (1,)))
@pytest.mark.parametrize("name", ("amax", "amin"))
def test_extremes_of_infinities_stay_infinite(name: str, dims: tuple[int, ...]) -> None:
    """The library's begin at the least and the largest finite number: PyTorch computes them."""
    x = torch.full((2, 3, 6, 5), -math.inf if name == "amax" else math.inf)
    x[0, 0, 0, 0] = 1.0
    model = net(lambda m, x: m[0](getattr(torch, name)(x, dims, keepdim=True)) * 2, nn.LeakyReLU(0.5))
    with torch.no_grad():
        assert torch.equal(zendnn_cffi.optimize(model, tune="off")(x), model(x))


@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("keepdim", (False, True))
@pytest.mark.parametrize("dims", ((1,), (0,), (1, 2), (-2,), (0, 1), (0, 1, 2)))
@pytest.mark.parametrize("name", ("mean", "sum"))
def test_sums_over_other_dimensions_are_products_with_ones(
    name: str, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None
) -> None:
    model = behind_convolution(lambda y: getattr(torch, name)(y, dims, keepdim=keepdim))
    found = offload(model, noise(2, 3, 6, 5), dtype=dtype, scale=40.0, k=900)
    assert kinds(found)[1] == "reduction"
    assert "brg" in found.nodes[1].implementation or "gemm" in found.nodes[1].implementation


@pytest.mark.parametrize(("shape", "dims"), (((2, 3000, 8), 1), ((2500, 8), 0), ((2, 30, 40, 8), (1, 2))), ids=str)
@pytest.mark.parametrize("name", ("mean", "sum"))
def test_long_sums_keep_eagers_digits(name: str, shape: tuple[int, ...], dims: Any) -> None:
    """Products with ones add up one number after another: relative errors are 1e-6 and more there."""
    model = net(lambda m, x: getattr(torch, name)(m[0](x).sigmoid(), dims), nn.Linear(8, 8))
    gm: Any = zendnn_cffi.optimize(model, tune="off")
    assert relative_error(gm, model, noise(*shape)) < 4e-7
    assert len(gm.regions()) == 1 and kinds(zendnn_cffi.explain(gm))[-1] == "torch"


@pytest.mark.parametrize("value", (math.inf, -math.inf, math.nan))
def test_a_sum_of_what_is_no_number(value: float) -> None:
    """One column has it, the others do not."""
    x = noise(2, 3, 6, 5)
    x[0, 0, 0, 0] = value
    gm = zendnn_cffi.optimize(net(lambda m, x: m[0](x).sum(2), nn.Conv2d(3, 4, 1)), tune="off")
    with torch.no_grad():
        ours = gm(x)
    assert {c.kind for r in gm.regions().values() for low in r.lowered.values() for c in low.program.calls} >= {
        "matmul"
    }
    assert ours[1].isfinite().all() and ours[0, :, 1:].isfinite().all() and not ours[0, :, 0].isfinite().any()


@pytest.mark.parametrize(("name", "dims"), [("sum", (0, 2)), ("sum", (1, 3)), ("amax", (1,)), ("amin", (0, 1))])
def test_other_reductions_stay_right(name: str, dims: tuple[int, ...]) -> None:
    found = offload(behind_convolution(lambda y: getattr(torch, name)(y, dims)), noise(2, 3, 6, 5), scale=20.0)
    assert kinds(found) == ["convolution", "torch"]


@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("keepdim", (False, True))
@pytest.mark.parametrize("dims", ((1,), (0, 2), (2, 3), (-1,), (0, 1, 2, 3)), ids=str)
@pytest.mark.parametrize("tune", ("off", "full"))
def test_norms(dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None, tune: str) -> None:
    model = behind_convolution(lambda y: torch.linalg.vector_norm(y, 2, dims, keepdim))
    found = offload(model, noise(2, 3, 6, 5), dtype=dtype, scale=40.0, tune=tune)
    assert len(zendnn_cffi.optimize(model).regions()) == 1
    assert found.nodes[1].became in ("reduction", "torch")
    assert not found.nodes[1].reason or "fastest" in found.nodes[1].reason


def test_norms_of_long_rows_have_eagers_digits() -> None:
    """The primitive adds up one number after another."""
    model = net(lambda m, x: m[0](x).norm(2, -1, keepdim=True), nn.LeakyReLU(0.5))
    x = noise(4, 50_000)
    assert relative_error(zendnn_cffi.optimize(model, tune="off"), model, x) <= 1.1 * relative_error(model, model, x)


def test_no_norm_is_not_zero_of_infinities() -> None:
    model, x = net(lambda m, x: m[0](x).norm(2, (1, 2)) * 2, nn.LeakyReLU(0.5)), noise(3, 4, 5)
    x[0, 1, 2], x[1, 0, 0], x[2] = math.inf, math.nan, 0.0
    with torch.no_grad():
        for tune in ("off", "full"):
            torch.testing.assert_close(zendnn_cffi.optimize(model, tune=tune)(x), model(x), equal_nan=True)


@pytest.mark.parametrize("shape", ((), (0,), (3, 0)))
def test_norms_of_numbers_and_of_nothing(shape: tuple[int, ...]) -> None:
    model = net(lambda m, x: m[0](x).norm(2, -1 if x.dim() == 0 else (0,)) * 2, nn.LeakyReLU(0.5))
    x = torch.full(shape, -3.0)
    torch.testing.assert_close(zendnn_cffi.optimize(model, x, tune="off")(x), model(x))


def test_responses_that_are_normalized_are_in_one_region() -> None:
    """As ConvNeXt V2 does in each block."""

    def normalized(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m[0](x)
        norms = x.norm(p=2, dim=(2, 3), keepdim=True)
        y = x * (norms / (norms.mean(1, keepdim=True) + 1e-6))
        return m[2](x + torch.addcmul(m[1].bias.view(1, -1, 1, 1), m[1].weight.view(1, -1, 1, 1), y))  # type: ignore

    model = net(normalized, nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 1))
    assert len(zendnn_cffi.optimize(model).regions()) == 1
    became = [node.became for node in offload(model, noise(2, 3, 9, 8), tune="full").nodes]
    assert became.count("convolution") == 2
