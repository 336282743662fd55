"""Pooling in windows, adaptive and global; reductions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from fx_passes.candidates.candidates import Candidate
from fx_passes.candidates.layouts import in_memory
from fx_passes.search.measure import is_rival
from tests.support.lowering import kinds, net, noise, offload, relative_error

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


@pytest.mark.parametrize("sizes", ((56, 56), (1, 300), (3000,), (9, 11, 13)), ids=str)
@pytest.mark.parametrize("behind", (True, False), ids=("behind a convolution", "first"))
def test_means_of_many_numbers_keep_eagers_digits(behind: bool, sizes: tuple[int, ...]) -> None:
    """Windows of the library add up one number after another: relative errors are 1e-6 and more there."""
    rank, dims = len(sizes), tuple(range(2, len(sizes) + 2))
    first = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[rank](16, 16, 1) if behind else nn.LeakyReLU(0.5)
    functions: list[Any] = [
        lambda m, x: m[1](m[0](x).sigmoid()),
        lambda m, x: m[0](x).sigmoid().mean(dims),
        lambda m, x: m[0](x).sigmoid().mean(dims, keepdim=True),
    ]
    for fn in functions:
        model = net(fn, first, ADAPTIVE[rank](1))
        gm: Any = zendnn_cffi.optimize(model, tune="off")
        assert relative_error(gm, model, noise(2, 16, *sizes)) < 4e-7
        assert len(gm.regions()) == 1 and kinds(zendnn_cffi.explain(gm))[-1] == "torch"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("channels", "blocked"), ((32, True), (17, False)))
def test_means_in_every_layout(
    channels: int, blocked: bool, dtype: torch.dtype | None, torch_is_fastest: list[Candidate]
) -> None:
    """In nChw16c, too, where no padding fills a block. The numbers of every candidate measured are compared."""
    model = net(lambda m, x: m[0](x).mean((2, 3)), nn.Conv2d(3, channels, 1))
    offload(model, noise(2, 3, 20, 18), dtype=dtype, tune="full", k=360)
    found = [c for c in torch_is_fastest if is_rival(c) and c.dst.dims == (2, channels)]
    assert found and any(bool(in_memory(c.srcs[0]).inner_blocks) for c in found) == blocked


def test_max_pool_of_infinity() -> None:
    x = noise(1, 3, 4, 4)
    x[0, 0, 0, 0], x[0, 1, 1, 1] = float("inf"), -float("inf")
    offload(net(lambda m, x: m[0](x), nn.MaxPool2d(2)), x, scale=1.0)
