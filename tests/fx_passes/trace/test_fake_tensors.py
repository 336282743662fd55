"""Fake tensors that torch.export follows a forward with: no cache, and PyTorch's setting as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo import config
from torch._subclasses.fake_tensor import FakeTensorMode

from fx_passes.trace.export import export


class Blocks(nn.Module):
    """The same layer several times, and in the middle what depends on a size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.layer(x).relu() / x.shape[0]
        return x


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_remembered_and_the_setting_stays(enabled: bool) -> None:
    FakeTensorMode.cache_clear()
    with config.patch(fake_tensor_cache_enabled=enabled):
        export(Blocks().eval(), (torch.ones(3, 4),), {})
        assert config.fake_tensor_cache_enabled is enabled
    found = FakeTensorMode.cache_info()
    assert (found.size, found.hits, found.misses) == (0, 0, 0)
