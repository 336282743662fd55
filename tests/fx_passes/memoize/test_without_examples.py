"""Results that are remembered in graphs whose values have no examples: those that torch.fx traces itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.memoize.memoised import Memoised


class Relative(nn.Module):
    """Attention over feature maps that convolutions halve, with relative positions, as MViT has them."""

    def __init__(self, writes: bool, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(6, 6, 3, 2, 1) for _ in range(depth))
        self.rows = nn.ParameterList(nn.Parameter(torch.randn(256, 6) / 4) for _ in range(depth))
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        for layer, rows in zip(self.layers, self.rows, strict=True):
            x = layer(x)
            n, channels, height, width = x.shape
            tokens = x.reshape(n, channels, height * width).transpose(1, 2)
            places = torch.arange(height * width, device=x.device, dtype=torch.long)
            distance = places.unsqueeze(-1) * max(height / width, 1.0) - places.unsqueeze(0) * 0.5
            distance += (width - 1) * max(width / height, 1.0)
            scores = tokens @ tokens.transpose(-2, -1)
            bias = tokens @ rows[distance.long()].mean(1).transpose(-2, -1)
            if self.writes:
                scores[:, :, 1:] += bias[:, :, 1:]
            else:
                scores = scores + bias
            x = (scores.softmax(-1) @ tokens).transpose(1, 2).reshape(n, channels, height, width)
        return x


def memo(gm: Any) -> list[Memoised]:
    return [module for module in gm.modules() if isinstance(module, Memoised)]


@pytest.mark.parametrize("writes", [False, True])
def test_positions_of_each_layer_are_remembered(writes: bool) -> None:
    """A layer's sizes are known once the one before is computed, and no write is passed by."""
    model = Relative(writes).eval()
    gm = zendnn_cffi.optimize(model, tune="off")
    for size in (12, 24, 12):
        x = torch.randn(2, 6, size, size)
        torch.testing.assert_close(gm(x), model(x))
    found = memo(gm)
    assert len(found) == 3
    assert [module.kept for module in found] == [2, 2, 2]
    assert not [node for node in gm.graph.nodes if "arange" in str(node.target)], gm.code


def test_what_depends_on_the_device_and_dtype_of_a_value() -> None:
    class Ramp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            ramp = torch.arange(x.shape[1], dtype=x.dtype, device=x.device).unsqueeze(-1).cos()
            return self.linear(x * ramp)

    model = Ramp().eval()
    gm = zendnn_cffi.optimize(model, tune="off")
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(gm(x), model(x))
    double = torch.randn(2, 3, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        model(double)
    with pytest.raises(RuntimeError):
        gm(double)


def test_random_numbers_are_drawn_in_each_call() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(x.shape[1], device=x.device).unsqueeze(-1).cos()
            return self.linear(x) * noise

    x = torch.randn(2, 3, 4)
    gm = zendnn_cffi.optimize(Noisy().eval(), tune="off")
    assert not torch.equal(gm(x), gm(x))
