"""optimize(..., release_weights=True): the same results from packed weights alone, and clear errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from fx_passes.region.region import weights_bytes
from tests.support.lowering import net, noise
from tests.tolerance import assert_close


def model() -> nn.Module:
    """Folded, grouped, depthwise, transposed, 1x1 and linear weights, one of them read outside the regions too."""
    return net(
        lambda m, x: m[6](m[5](m[4](F.relu(m[1](m[0](x))) + m[2](x)) * m[3].weight.sum()).mean((2, 3))),
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.Conv2d(3, 32, 1),
        nn.Conv2d(32, 32, 3, groups=32),
        nn.Conv2d(32, 16, 3, groups=4, padding=1),
        nn.ConvTranspose2d(16, 17, 2),
        nn.Linear(17, 10),
    )


@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("allow_winograd", (True, False))
def test_same_results_now_and_for_new_shapes(dtype: torch.dtype | None, allow_winograd: bool) -> None:
    original = model()
    state = copy.deepcopy(original.state_dict())
    options: dict[str, Any] = {"dtype": dtype, "allow_winograd": allow_winograd, "tune": "off"}
    gm = zendnn_cffi.optimize(original, release_weights=True, **options)
    kept = zendnn_cffi.optimize(original, **options)
    for shape in ((2, 3, 9, 9), (1, 3, 9, 9), (3, 3, 14, 11)):
        x = noise(*shape)
        assert_close(gm(x), kept(x), dtype=dtype, k=300)
        assert_close(gm(x), kept(x), dtype=dtype, k=300)
    with torch.autocast("cpu", enabled=True):  # plain PyTorch, on weights made again
        gm(noise(2, 3, 9, 9))
    assert sum(p.numel() for p in gm.parameters()) < sum(p.numel() for p in original.parameters()) / 2
    assert all(torch.equal(value, state[name]) for name, value in original.state_dict().items())


@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
def test_transposed_packed_weights_become_plain_again(dtype: torch.dtype | None) -> None:
    """Square weights: a transpose forgotten would not show in the shape."""
    original = net(lambda m, x: m[1](F.relu(m[0](x))), nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
    gm = zendnn_cffi.optimize(original, release_weights=True, tune="off", dtype=dtype)
    for rows in (128, 5, 1):
        expected = copy.deepcopy(original).double()(noise(rows, 64).double())
        assert_close(gm(noise(rows, 64)), expected.detach(), dtype=dtype or torch.float32, k=64)


def test_what_needs_the_weights_says_that_they_are_gone() -> None:
    gm = zendnn_cffi.optimize(model(), release_weights=True, tune="off")
    state = gm.state_dict()
    gm(noise(2, 3, 9, 9))
    for use in (gm.state_dict, lambda: gm.load_state_dict(state), gm.double):
        with pytest.raises(RuntimeError, match="release_weights=True"):
            use()


def test_shared_parameter_that_stays_outside_is_kept() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 50)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cumprod(self.linear(x), 1) + torch.sort(self.linear.weight).values.sum()

    original = Tied().eval()
    gm = zendnn_cffi.optimize(original, release_weights=True, tune="off")
    x = noise(4, 32) / 10
    for _ in range(2):
        with torch.no_grad():
            assert_close(gm(x), original(x), k=64, scale=20.0)


def test_memory_is_counted() -> None:
    original = net(lambda m, x: m[1](F.relu(m[0](x))), nn.Linear(256, 512), nn.Linear(512, 256))
    gm = zendnn_cffi.optimize(original, release_weights=True, tune="off")
    (region,) = gm.regions().values()
    before, packed = weights_bytes([region])
    assert (before, packed) == (sum(p.numel() for p in original.parameters()) * 4, 0)
    gm(noise(8, 256))
    after, packed = weights_bytes([region])
    assert after < before / 10
    assert packed >= 2 * 256 * 512 * 4
