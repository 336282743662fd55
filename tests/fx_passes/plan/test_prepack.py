"""Constants in the layouts that implementations want."""

from __future__ import annotations

import torch
from torch import nn

import zendnn_cffi
from fx_passes.candidates.candidates import Weights
from fx_passes.candidates.layouts import row_major
from fx_passes.plan.prepack import WeightStore


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


def test_layouts_that_no_program_uses_any_longer_are_forgotten() -> None:
    """Each length has constants of its own: what describes them goes with them."""
    store = WeightStore()
    kept = store.get(_ones(7))
    for length in range(8, 400):
        store.get(_ones(length))
    (packed,) = store.by_name()["ones"]
    assert packed.data is kept and packed.desc == _ones(7).desc
    assert len(store._descs) < 64
    again = [store.get(_ones(length)) for length in range(8, 200)]
    assert sorted(p.desc.dims for p in store.by_name()["ones"]) == [(1, n) for n in range(7, 200)]
    del again


def _ones(length: int) -> Weights:
    return Weights("ones", torch.ones(1, length), row_major((1, length), torch.float32))
