"""The model of the serving examples, saved as they load it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

import zendnn_cffi


def build() -> nn.Module:
    """A small image classifier; yours comes here."""
    torch.manual_seed(0)
    body = nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(64, 10)).eval()


def images(batch: int) -> torch.Tensor:
    """What it classifies."""
    return torch.randn(batch, 3, 64, 64, generator=torch.Generator().manual_seed(batch))


def save(model: nn.Module, path: Path, batches: Iterable[int], cores: int) -> None:
    """Save it for workers of so many cores, with a call before for each size of batch that is to start fast."""
    fast = zendnn_cffi.optimize(model)
    with torch.inference_mode(), zendnn_cffi.warm_up():
        for batch in batches:
            fast(images(batch))
    zendnn_cffi.save(fast, path, threads=[cores])
