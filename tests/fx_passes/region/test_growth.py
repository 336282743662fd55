"""What a program leaves behind once it is gone: nothing that only a collection of all objects would find."""

from __future__ import annotations

import gc
import statistics
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zendnn_cffi
from fx_passes.region import programs
from tests.support.lowering import noise

_UNTIL_FULL = 130  # lengths: the largest cache of descriptors holds 1,024 tuples, ten a length


class Layer(nn.Module):
    """Attention and a linear layer: [N, length, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.read(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        result: Tensor = self.norm(x + self.write(y))
        return result


def objects(module: Any) -> int:
    """How many there are without idle contexts, which go where they take too many bytes."""
    for region in module.regions().values():
        for lowered in region.lowered.values():
            lowered.program.free_idle()
    return len(gc.get_objects())


def test_objects_do_not_pile_up_over_many_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the caches of descriptors are full. Without the collector, whose look at all objects comes after dozens."""
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 32)
    fast: Any = zendnn_cffi.optimize(Layer().eval(), (noise(1, 5, 16),), tune="off")
    lengths = iter(range(6, 400))
    with torch.no_grad(), zendnn_cffi.warm_up():
        for _ in range(36):
            fast(noise(1, next(lengths), 16))
        gc.collect()
        gc.disable()
        try:
            fakes, garbages = FakeTensorMode.cache_info().size, []
            for _ in range(10):
                fast(noise(1, next(lengths), 16))
                garbages.append(gc.collect())
            for _ in range(_UNTIL_FULL):
                fast(noise(1, next(lengths), 16))
            before = objects(fast)
            for _ in range(20):
                fast(noise(1, next(lengths), 16))
            grown = objects(fast) - before
        finally:
            gc.enable()
    assert sum(len(region.lowered) for region in fast.regions().values()) == 32
    # The median, as other threads and what runs once in a process leave objects behind, too.
    assert statistics.median(garbages) < 30, "what lowering leaves is freed at once: 640 objects a length before"
    assert grown < 20 * 30, "descriptors are bounded: 940 objects a length before"
    assert FakeTensorMode.cache_info().size == fakes, "that cache has no bound"
