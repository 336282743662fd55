"""Pooling in windows, adaptive and global; reductions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.lowering import kinds, net, noise, offload

DTYPES = (None, torch.bfloat16)
MAX = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVG = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
ADAPTIVE = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
SPATIAL = {1: (11,), 2: (9, 8), 3: (5, 6, 7)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", MAX)
@pytest.mark.parametrize("channels", (3, 16))
def test_windows(rank: int, channels: int, dtype: torch.dtype | None) -> None:
    x = noise(2, channels, *SPATIAL[rank])
    cases: list[nn.Module] = [
        MAX[rank](2),
        MAX[rank](3, 2, 1),
        MAX[rank](3, 2, 1, ceil_mode=True),
        MAX[rank](2, 2, ceil_mode=True),
        AVG[rank](2),
        AVG[rank](3, 1, 1),
        AVG[rank](3, 2, 1, count_include_pad=False),
        AVG[rank](3, 2, 1, ceil_mode=True, count_include_pad=False),
        AVG[rank](3, stride=1),
    ]
    for pool in cases:
        found = offload(net(lambda m, x: m[0](x), pool), x, dtype=dtype, k=9)
        assert kinds(found) == ["pooling"], pool


@pytest.mark.parametrize(
    "pool",
    (
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d((3, 2), (2, 1), (1, 0)),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        nn.AvgPool2d(2, 2, ceil_mode=True),
        nn.AvgPool2d(3, divisor_override=2),
        nn.AvgPool2d((2, 3), (1, 2), (1, 1)),
        nn.MaxPool2d(2, return_indices=False),
        nn.MaxPool2d(8, 1, 4),
    ),
    ids=str,
)
def test_unusual_windows(pool: nn.Module) -> None:
    """Whatever runs them, the numbers are eager's."""
    for shape in ((2, 17, 9, 8), (1, 1, 8, 8), (3, 9, 8)):
        offload(net(lambda m, x: m[0](torch.abs(x) + 1), pool), noise(*shape), k=9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", ADAPTIVE)
@pytest.mark.parametrize("channels", (3, 16, 17))
def test_global(rank: int, channels: int, dtype: torch.dtype | None) -> None:
    dims = tuple(range(2, rank + 2))
    functions: list[Any] = [
        lambda m, x: m[0](x),
        lambda m, x: torch.flatten(m[0](x), 1),
        lambda m, x: x.mean(dims),
        lambda m, x: x.mean(dims, keepdim=True),
        lambda m, x: torch.mean(x, [d - rank - 2 for d in dims]),
    ]
    for fn in functions:
        found = offload(net(fn, ADAPTIVE[rank](1)), noise(2, channels, *SPATIAL[rank]), dtype=dtype, k=210)
        assert kinds(found) == ["pooling"], fn


@pytest.mark.parametrize(
    ("size", "became"), (((3, 2), "pooling"), ((9, None), "pooling"), ((2, 3), "torch"), (7, "torch"))
)
@pytest.mark.parametrize("kind", (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d))
def test_adaptive(kind: Any, size: Any, became: str) -> None:
    found = offload(net(lambda m, x: m[1](m[0](x)), nn.Conv2d(3, 17, 1), kind(size)), noise(2, 3, 9, 8))
    assert kinds(found) == ["convolution", became]


@pytest.mark.parametrize(
    "fn",
    (
        lambda m, x: m[0](x).sum((2, 3)),
        lambda m, x: m[0](x).mean(1, keepdim=True),
        lambda m, x: m[0](x).mean(),
        lambda m, x: m[0](x).mean(-1) + m[0](x).mean(-1),
        lambda m, x: torch.amin(m[0](x), (1, 2)),
        lambda m, x: torch.amax(m[0](x), 1),
        lambda m, x: m[0](x).flatten(1).mean(1),
        lambda m, x: m[0](x).flatten(2).mean(2),
        lambda m, x: m[0](x).flatten(2).mean(-1, keepdim=True),
    ),
)
def test_other_reductions_stay_right(fn: Any) -> None:
    assert "convolution" in kinds(offload(net(fn, nn.Conv2d(3, 17, 1)), noise(2, 3, 5, 4), k=340))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("channels", (16, 17))
def test_squeeze_and_excite(channels: int, batch: int, dtype: torch.dtype | None) -> None:
    def fn(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.silu(m[0](x))
        gate = torch.sigmoid(m[2](torch.relu(m[1](y.mean((2, 3), keepdim=True)))))
        return m[3](y * gate)

    convs = [nn.Conv2d(3, channels, 3), nn.Conv2d(channels, 5, 1), nn.Conv2d(5, channels, 1), nn.Conv2d(channels, 4, 1)]
    found = offload(net(fn, *convs), noise(batch, 3, 8, 7), dtype=dtype)
    assert "torch" not in kinds(found) and kinds(found).count("convolution") == 4


def test_max_pool_of_infinity() -> None:
    x = noise(1, 3, 4, 4)
    x[0, 0, 0, 0], x[0, 1, 1, 1] = float("inf"), -float("inf")
    offload(net(lambda m, x: m[0](x), nn.MaxPool2d(2)), x, scale=1.0)
