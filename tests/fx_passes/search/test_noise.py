"""Noise in place of what programs read."""

from __future__ import annotations

import pytest
import torch

from fx_passes.candidates.specs import TensorSpec
from fx_passes.search.noise import _constant_noise, made_up


@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 3, 4), (12, 4, 1)), ((2, 3, 4), (0, 4, 1)), ((5,), (2,)), ((), ()), ((2, 3), (1, 2))]
)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int64, torch.bool))
def test_inputs_are_made_up_with_the_strides_asked_for(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = made_up(TensorSpec(shape, dtype, strides))
    assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (shape, strides, dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", ((5,), (17, 33), (301, 257)))
@pytest.mark.parametrize("transposed", (False, True))
def test_noise_for_weights_is_away_from_zero_in_their_strides(
    dtype: torch.dtype, shape: tuple[int, ...], transposed: bool
) -> None:
    value = torch.zeros(shape, dtype=dtype)
    value = value.t() if transposed and value.ndim == 2 else value
    noise = _constant_noise(value, torch.Generator().manual_seed(0))
    assert (noise.shape, noise.stride(), noise.dtype) == (value.shape, value.stride(), dtype)
    scale = max(1, value[0].numel()) ** 0.5
    assert 0.4 < float(noise.float().abs().min()) * scale < float(noise.float().abs().max()) * scale < 7
    assert len(noise.unique()) > 2
