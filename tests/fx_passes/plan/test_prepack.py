"""Constants in the layouts that implementations want."""

from __future__ import annotations

import torch
from torch import nn

import zendnn_cffi


@torch.no_grad()
def test_channels_last_weights_are_transformed_for_winograd() -> None:
    """The library reorders to Winograd's layout from row-major weights alone; the region ran as plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()).eval().to(memory_format=torch.channels_last)
    images = torch.randn(1, 64, 56, 56).to(memory_format=torch.channels_last)
    fast = zendnn_cffi.optimize(model, tune="off")
    difference = (fast(images) - model(images)).abs().max()
    assert float(difference) < 1e-4
    (convolution,) = [node for node in zendnn_cffi.explain(fast).nodes if node.became == "convolution"]
    assert "wino" in convolution.implementation
