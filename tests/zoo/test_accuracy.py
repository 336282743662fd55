"""How exact whole networks are, against the same network in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from demo import vision

SIDE, BATCH = 96, 2
ORDER = 1.02  # the order of summation, which no one promises, changes an error by so much
LOW = ["resnet18", "mobilenet_v2", "densenet121", "efficientnet_b0", "googlenet", "shufflenet_v2_x1_0", "convnext_tiny"]


def network(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The network, images for it, and what it makes of them in float64."""
    model = vision.build(name)
    x = torch.randn(BATCH, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model, x, copy.deepcopy(model).double()(x.double())


def primitives(fast: nn.Module, x: Tensor) -> set[tuple[str, str]]:
    """Kind and implementation of what ran."""
    return {(record.kind, record.implementation) for record in zendnn_cffi.profile(fast, x).records}


def root_mean_square(error: Tensor) -> float:
    return error.double().square().mean().sqrt().item()


@pytest.mark.parametrize("name", LOW)
def test_bfloat16_loses_no_more_than_eager(name: str) -> None:
    model, x, exact = network(name)
    fast = zendnn_cffi.optimize(model, (x,), dtype=torch.bfloat16, tune="off")
    with torch.no_grad():
        ours = fast(x)
        eager = copy.deepcopy(model).bfloat16()(x.bfloat16())
    assert ours.dtype == torch.float32
    assert {kind for kind, name in primitives(fast, x) if name != "torch"} >= {"convolution"}
    assert root_mean_square(ours - exact) <= ORDER * root_mean_square(eager - exact)


@pytest.mark.needs("avx512")
@pytest.mark.parametrize(("allow_winograd", "tolerance"), ((True, 1e-4), (False, 2e-5)))
@pytest.mark.parametrize("name", ("resnet18", "vgg11"))
def test_float32(name: str, allow_winograd: bool, tolerance: float) -> None:
    model, x, exact = network(name)
    fast = zendnn_cffi.optimize(model, (x,), tune="off", allow_winograd=allow_winograd)
    with torch.no_grad():
        error = (fast(x) - exact).abs().max() / exact.abs().max()
    assert any("wino" in name for _, name in primitives(fast, x)) == allow_winograd
    assert error <= tolerance
