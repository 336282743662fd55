"""Folded constants: rounded once, in memory of their own or in memory that is used again."""

from __future__ import annotations

import pytest
import torch

from fx_passes.ops.constants import scale_channels
from zendnn_cffi.runtime.huge_pages import Reused, lending


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (7,), (64, 3, 7, 7), (3, 200_000), (513, 300, 3, 3)])
@torch.no_grad()
def test_products_in_reused_memory_are_those_in_memory_of_their_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    weight = torch.randn(shape, generator=generator).to(dtype)
    factor = torch.randn(shape[0], generator=generator)
    expected = (weight.double() * factor.double().view(-1, *[1] * (len(shape) - 1))).to(dtype)
    memory = Reused()
    with lending(memory):
        found = scale_channels(weight, factor)
        assert found.data_ptr() == memory.take(1).data_ptr()
        another = scale_channels(weight, factor)  # in memory of its own: the first is still read, maybe
        assert another.data_ptr() != found.data_ptr()
    assert torch.equal(found, expected) and torch.equal(another, expected)
    assert torch.equal(scale_channels(weight, factor), expected)


@torch.no_grad()
def test_strides_stay() -> None:
    weight = torch.randn(16, 8, 3, 3).to(memory_format=torch.channels_last)
    with lending(Reused()):
        found = scale_channels(weight, torch.ones(16))
    assert found.stride() == weight.stride() and torch.equal(found, weight)
