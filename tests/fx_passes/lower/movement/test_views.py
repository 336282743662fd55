"""Views and parts between convolutions: equal to eager, and what they became."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fx_passes.lower.movement.views import index_box
from tests.support.lowering import behind_convolution, kinds, noise, offload

DTYPES = (None, torch.bfloat16)


Function = Callable[[Any], Any]


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
    found = offload(behind_convolution(function), noise(2, 3, 6, 5), dtype=dtype)
    assert "convolution" in kinds(found)


@pytest.mark.parametrize(
    "function",
    (lambda y: y.contiguous(), lambda y: y.unsqueeze(1), lambda y: y.expand(2, 16, 6, 5)),
    ids=("contiguous", "unsqueeze", "expand"),
)
def test_views_cost_nothing(function: Function) -> None:
    found = offload(behind_convolution(function), noise(2, 3, 6, 5))
    assert kinds(found) == ["convolution"]


def test_index_box() -> None:
    assert index_box(0, (3, 4)) == ((0, 0), (1, 4))
    assert index_box((slice(1, None), -1), (3, 4)) == ((1, 3), (2, 1))
    assert index_box((Ellipsis, None, 2), (3, 4, 5)) == ((0, 0, 2), (3, 4, 1))
    assert index_box((slice(None, None, 2),), (3, 4)) is None
    assert index_box((slice(2, 1),), (3, 4)) is None
    assert index_box((0, 0, 0), (3, 4)) is None
    assert index_box(True, (3, 4)) is None
