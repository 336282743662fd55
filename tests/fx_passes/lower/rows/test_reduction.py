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
