"""The gate of one image is multiplied into the weights of the next convolution, where those are much smaller."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes.lower.windows import gated_weights
from tests.support.lowering import kinds, net, noise, offload

Block = Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worth it from 8 times as many numbers on, however few."""
    monkeypatch.setattr(gated_weights, "_FEWEST_NUMBERS", 0)


def gate(m: nn.ModuleList, y: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(m[2](F.relu(m[1](F.adaptive_avg_pool2d(y, 1)))))


def project(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    y = F.relu(m[0](x))
    return m[3](y * gate(m, y))


def project_swapped(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    y = F.relu(m[0](x))
    return F.relu(m[3](gate(m, y) * y))


def block(channels: int = 32, out: int = 24, **options: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(3, channels, 3), nn.Conv2d(channels, 8, 1), nn.Conv2d(8, channels, 1),
        nn.Conv2d(channels, out, **{"kernel_size": 1, **options}),
    )  # fmt: skip


def products(model: nn.Module, x: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[list[str], list[str]]:
    """Names of the products, and the layouts of their results."""
    found = offload(model, x, dtype=dtype)
    others = [node for node in found.nodes if not node.name.startswith("adaptive_avg_pool")]  # a long mean is PyTorch's
    nodes = [node for node in others if node.became in ("binary", "torch")]
    assert kinds(found).count("convolution") == 4
    return [node.name for node in nodes], [node.implementation for node in nodes]


@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("fn", (project, project_swapped))
@pytest.mark.parametrize(
    "convolutions", (block(), block(17, 3), block(16, 1), block(32, 24, stride=2)), ids=("32", "17", "16", "stride")
)
def test_gate_moves_into_weights(fn: Block, convolutions: tuple[nn.Module, ...], dtype: torch.dtype | None) -> None:
    names, implementations = products(net(fn, *convolutions), noise(1, 3, 40, 37), dtype)
    assert names == ["binary_1"] or names == ["binary"], names
    if convolutions[0].weight.shape[0] % 16 == 0:
        assert "_dw" in implementations[0]


def test_larger_kernels_scale_their_weights_too() -> None:
    """By plain PyTorch, as the weights are no image of one pixel each."""
    names, implementations = products(net(project, *block(16, 2, kernel_size=3, padding=1)), noise(1, 3, 40, 37))
    assert len(names) == 1 and implementations == ["torch"]


@pytest.mark.parametrize("batch", (1, 2))
def test_products_that_stay(batch: int) -> None:
    """Of two images; where the weights are not much smaller; of a product read twice; of groups; of no gate."""

    def twice(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(m[0](x))
        z = y * gate(m, y)
        return m[3](z).amax() + z

    def full(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(m[0](x))
        return m[3](y * (gate(m, y) * y))

    small, large = noise(batch, 3, 9, 9), noise(batch, 3, 40, 37)
    cases = [(project, block(32, 24), small), (twice, block(), large), (project, block(32, 32, groups=2), large)]
    for fn, convolutions, x in [*cases, *([(project, block(), large)] if batch > 1 else [])]:
        names, _ = products(net(fn, *convolutions), x)
        assert "mul" in names, names
    products(net(full, *block()), large)
