"""Blocks of convolutional networks: what becomes one primitive, and how many there are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.lowering import kinds, net, noise, offload

DTYPES = (None, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_conv_add_add_relu_is_one_primitive(dtype: torch.dtype | None) -> None:
    model = net(
        lambda m, x: F.relu(m[2](x) + m[0](x) + m[1](x)),
        *(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)),
    )
    found = offload(model, noise(2, 16, 9, 9), dtype=dtype)
    assert kinds(found) == ["convolution"] * 3
    assert sorted(len(node.post_ops) for node in found.nodes) == [0, 1, 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", (torch.sigmoid, F.hardsigmoid), ids=("sigmoid", "hardsigmoid"))
def test_squeeze_and_excite_stays_in_one_region(gate: object, dtype: torch.dtype | None) -> None:
    model = net(
        lambda m, x: m[3]((y := F.silu(m[0](x))) * gate(m[2](F.relu(m[1](F.adaptive_avg_pool2d(y, 1)))))),  # type: ignore[operator]
        nn.Conv2d(3, 32, 3),
        nn.Conv2d(32, 8, 1),
        nn.Conv2d(8, 32, 1),
        nn.Conv2d(32, 16, 1),
    )
    found = offload(model, noise(2, 3, 12, 12), dtype=dtype)
    assert len({node.region for node in found.nodes}) == 1
    assert "torch" not in kinds(found)
    assert kinds(found).count("convolution") == 4 and kinds(found).count("pooling") == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", (1, 3))
def test_shuffle_unit_copies_once_for_the_shuffle(batch: int, dtype: torch.dtype | None) -> None:
    def unit(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        left, right = m[0](x).chunk(2, dim=1)
        y = torch.cat((left, F.relu(m[1](right))), dim=1)
        n, c, h, w = y.size()
        return m[2](y.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w))

    model = net(unit, nn.Conv2d(3, 58, 3), nn.Conv2d(29, 29, 1), nn.Conv2d(58, 8, 1))
    found = offload(model, noise(batch, 3, 9, 9), dtype=dtype)
    assert "torch" not in kinds(found)
    assert kinds(found).count("convolution") == 3
