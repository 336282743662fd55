"""Networks of timm that are written in ways torchvision's are not: right, and in ZenDNN, not around it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zendnn_cffi
from demo import vision
from tests.support.answers import TOLERANCE

pytestmark = pytest.mark.slow


# What is peculiar, and the most regions that torch.fx or torch.export may cut the network into.
NETWORKS = {
    "eca_nfnet_l0": ("weights standardized in each call, gates expanded to what they multiply", 1),
    "resnetv2_50": ("assertions about the dimensions of each layer's result", 1),
    "rexnet_100": ("the same, and channels that grow in place", 1),
    "efficientvit_m0": ("a branch on image sizes; no linear before the pooling", 10),
    "twins_svt_small": ("windows of padded images, additions in place", 1),
    "poolformer_s12": ("group normalizations, of one group", 1),
    "tf_mobilenetv3_small_minimal_100": ("paddings that follow from image sizes, rounded and clamped", 1),
    "xcit_nano_12_p16_224": ("sizes that come from deep inside", 10),
}


def build(name: str) -> nn.Module:
    """The network with random weights, and statistics that are not all alike."""
    vision.torchvision()  # which timm imports
    import timm

    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, pretrained=False).eval()
    for norm in model.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.running_var is not None:
            norm.running_var.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("name", NETWORKS)
def test_right_and_offloaded(name: str) -> None:
    model, images = build(name), torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        expected = model(images)  # EfficientViT fills a cache; a forward that changes it would not be traced
    fast = zendnn_cffi.optimize(model, (images,), tune="off")
    with torch.inference_mode():
        assert (fast(images) - expected).abs().max() <= TOLERANCE * expected.abs().max()
        records = zendnn_cffi.profile(fast, images, runs=1).records
    assert len(fast.regions()) <= NETWORKS[name][1]
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    by_engine = [r for r in records if r.kind in ("convolution", "inner_product") and r.implementation != "torch"]
    assert len(by_engine) >= 0.9 * convolutions
