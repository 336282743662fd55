"""Noise in place of what programs read."""

from __future__ import annotations

import pytest
import torch

from fx_passes.candidates.specs import TensorSpec
from fx_passes.search.noise import made_up


@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 3, 4), (12, 4, 1)), ((2, 3, 4), (0, 4, 1)), ((5,), (2,)), ((), ()), ((2, 3), (1, 2))]
)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int64, torch.bool))
def test_inputs_are_made_up_with_the_strides_asked_for(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = made_up(TensorSpec(shape, dtype, strides))
    assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (shape, strides, dtype)
