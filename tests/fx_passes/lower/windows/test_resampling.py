"""Interpolation between convolutions: equal to eager, and what it became."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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


@pytest.mark.parametrize(("rank", "mode"), ((1, "linear"), (3, "trilinear")))
def test_resampling_of_other_ranks(rank: int, mode: str) -> None:
    conv = {1: nn.Conv1d, 3: nn.Conv3d}[rank](3, 8, 3)
    model = net(lambda m, x: F.interpolate(F.interpolate(m[0](x), scale_factor=2), scale_factor=2, mode=mode), conv)
    assert kinds(offload(model, noise(2, 3, *(5,) * rank))) == ["convolution", "resampling", "resampling"]
