"""Interpolation between convolutions: equal to eager, and what it became."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from tests.support.exported import needs_export
from tests.support.lowering import behind_convolution, kinds, net, noise, offload

DTYPES = (None, torch.bfloat16)


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
    found = offload(behind_convolution(lambda y: F.interpolate(y, **options)), noise(2, 3, 6, 5), dtype=dtype)
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
    found = offload(behind_convolution(lambda y: F.interpolate(y, **options)), noise(2, 3, 6, 5))
    assert "resampling" not in kinds(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    (
        {"scale_factor": 2, "mode": "bilinear", "align_corners": True},
        {"size": (7, 9), "mode": "bilinear", "align_corners": True},
        {"size": (7, 5)},
        {"scale_factor": 1.3, "mode": "bilinear"},
    ),
    ids=str,
)
def test_pytorch_s_kernels_read_images_as_they_lie(options: dict[str, Any], dtype: torch.dtype | None) -> None:
    """Between convolutions they cut no region, and nothing is reordered for them."""
    model = net(lambda m, x: m[1](F.interpolate(m[0](x), **options)), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    found = offload(model, noise(2, 8, 9, 8), dtype=dtype)
    assert [node.became for node in found.nodes].count("convolution") == 2
    rows = [node for node in found.nodes if node.became == "torch"]
    assert [node.layout.split()[0] for node in rows] == ["nhwc"]
    assert "aligned corners" in rows[0].reason or "PyTorch's" in rows[0].reason or "scale factor" in rows[0].reason


@pytest.mark.parametrize(("rank", "mode"), ((1, "linear"), (3, "trilinear")))
def test_resampling_of_other_ranks(rank: int, mode: str) -> None:
    conv = {1: nn.Conv1d, 3: nn.Conv3d}[rank](3, 8, 3)
    model = net(lambda m, x: F.interpolate(F.interpolate(m[0](x), scale_factor=2), scale_factor=2, mode=mode), conv)
    assert kinds(offload(model, noise(2, 3, *(5,) * rank))) == ["convolution", "resampling", "resampling"]


class Upsampled(nn.Module):
    """A convolution and an interpolation, in a forward that torch.fx does not trace."""

    def __init__(self, rank: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.conv, self.options = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[rank](3, 8, 3), options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        options = (
            {**self.options, "size": tuple(2 * n for n in y.shape[2:])} if "size" in self.options else self.options
        )
        return F.interpolate(y, **options) if needs_export(y) and y.shape[0] > 0 else y


@pytest.mark.parametrize(
    ("rank", "options", "found"),
    [
        (1, {"scale_factor": 2}, True),
        (2, {"scale_factor": 2}, True),
        (2, {"scale_factor": (2.0, 3.0)}, True),
        (2, {"size": None}, True),
        (2, {"size": None, "mode": "bilinear"}, True),
        (2, {"scale_factor": 2, "mode": "bilinear"}, True),
        (3, {"scale_factor": 2, "mode": "trilinear"}, True),
        (1, {"scale_factor": 2, "mode": "linear"}, True),
        (2, {"scale_factor": 1.5}, False),
        (2, {"scale_factor": 2, "mode": "bilinear", "align_corners": True}, False),
        (2, {"scale_factor": 2, "mode": "bicubic"}, False),
    ],
)
def test_exported_interpolation(rank: int, options: dict[str, Any], found: bool) -> None:
    torch.manual_seed(0)
    model, x = Upsampled(rank, options).eval(), noise(2, 3, *(7, 8, 6)[:rank])
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    torch.testing.assert_close(fast(x), model(x))
    assert ("resampling" in [node.became for node in zendnn_cffi.explain(fast).nodes]) == found
    other = noise(1, 3, *(5, 9, 7)[:rank])
    torch.testing.assert_close(fast(other), model(other))
