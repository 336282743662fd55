"""Views, parts, interpolation and reductions between convolutions: equal to eager, and what they became."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from fx_passes.lower.movement.views import index_box
from tests.support.lowering import kinds, net, noise, offload

DTYPES = (None, torch.bfloat16)
Function = Callable[[Any], Any]


def between(function: Function, out: int = 16) -> nn.Module:
    """A convolution before `function`."""
    return net(lambda m, x: function(m[0](x)), nn.Conv2d(3, out, 3, padding=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "function",
    (
        lambda y: F.relu(y.contiguous()),
        lambda y: y.unsqueeze(1) * 2,
        lambda y: y.unsqueeze(-1) * 2,
        lambda y: y.expand(-1, -1, -1, -1) + 1,
        lambda y: y[:, 0] + 1,
        lambda y: y[:, 1:9, 2] * 2,
        lambda y: y[..., None, 1] * 2,
        lambda y: y[1:, :, 1:-1, ::1] * 2,
        lambda y: y.flatten(2).transpose(1, 2)[:, 0],
        lambda y: F.pad(y, (1, 2, 0, 1)) + 1,
    ),
    ids=range(10),
)
def test_views(function: Function, dtype: torch.dtype | None) -> None:
    found = offload(between(function), noise(2, 3, 6, 5), dtype=dtype)
    assert "convolution" in kinds(found)


@pytest.mark.parametrize(
    "function",
    (lambda y: y.contiguous(), lambda y: y.unsqueeze(1), lambda y: y.expand(2, 16, 6, 5)),
    ids=("contiguous", "unsqueeze", "expand"),
)
def test_views_cost_nothing(function: Function) -> None:
    found = offload(between(function), noise(2, 3, 6, 5))
    assert kinds(found) == ["convolution"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    (
        {"scale_factor": 2},
        {"scale_factor": (3, 2)},
        {"size": (12, 10)},
        {"scale_factor": 2, "mode": "bilinear"},
        {"size": (5, 13), "mode": "bilinear"},
        {"size": (3, 2), "mode": "bilinear"},
    ),
    ids=str,
)
def test_resampling(options: dict[str, Any], dtype: torch.dtype | None) -> None:
    found = offload(between(lambda y: F.interpolate(y, **options)), noise(2, 3, 6, 5), dtype=dtype)
    assert kinds(found) == ["convolution", "resampling"]


@pytest.mark.parametrize(
    "options",
    (
        {"size": (7, 5)},
        {"scale_factor": 0.5},
        {"scale_factor": 1.3},
        {"scale_factor": 1.3, "mode": "bilinear"},
        {"scale_factor": 2, "mode": "bilinear", "align_corners": True},
        {"scale_factor": 2, "mode": "bicubic"},
        {"scale_factor": 2, "mode": "nearest-exact"},
        {"size": (3, 3), "mode": "area"},
    ),
    ids=str,
)
def test_other_interpolation_stays_right(options: dict[str, Any]) -> None:
    found = offload(between(lambda y: F.interpolate(y, **options)), noise(2, 3, 6, 5))
    assert "resampling" not in kinds(found)


@pytest.mark.parametrize(("rank", "mode"), ((1, "linear"), (3, "trilinear")))
def test_resampling_of_other_ranks(rank: int, mode: str) -> None:
    conv = {1: nn.Conv1d, 3: nn.Conv3d}[rank](3, 8, 3)
    model = net(lambda m, x: F.interpolate(F.interpolate(m[0](x), scale_factor=2), scale_factor=2, mode=mode), conv)
    assert kinds(offload(model, noise(2, 3, *(5,) * rank))) == ["convolution", "resampling", "resampling"]


@pytest.mark.parametrize("keepdim", (False, True))
@pytest.mark.parametrize("dims", ((1, 2, 3), (3,), (2, 3), (-1, -2)))
@pytest.mark.parametrize("name", ("mean", "sum"))
def test_reductions(name: str, dims: tuple[int, ...], keepdim: bool) -> None:
    found = offload(between(lambda y: getattr(torch, name)(y, dims, keepdim=keepdim)), noise(2, 3, 6, 5), scale=20.0)
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
    model = between(lambda y: getattr(torch, name)(y, dims, keepdim=keepdim))
    found = offload(model, noise(2, 3, 6, 5), dtype=dtype, scale=40.0, k=900)
    assert kinds(found)[1] == "reduction"
    assert "brg" in found.nodes[1].implementation or "gemm" in found.nodes[1].implementation


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
    found = offload(between(lambda y: getattr(torch, name)(y, dims)), noise(2, 3, 6, 5), scale=20.0)
    assert kinds(found) == ["convolution", "torch"]


def test_index_box() -> None:
    assert index_box(0, (3, 4)) == ((0, 0), (1, 4))
    assert index_box((slice(1, None), -1), (3, 4)) == ((1, 3), (2, 1))
    assert index_box((Ellipsis, None, 2), (3, 4, 5)) == ((0, 0, 2), (3, 4, 1))
    assert index_box((slice(None, None, 2),), (3, 4)) is None
    assert index_box((slice(2, 1),), (3, 4)) is None
    assert index_box((0, 0, 0), (3, 4)) is None
    assert index_box(True, (3, 4)) is None
