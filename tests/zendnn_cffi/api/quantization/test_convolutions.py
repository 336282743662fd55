"""Convolutions of sequences and volumes, which torchao's quantizer overlooks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import zendnn_cffi
from tests.support.lowering import noise
from zendnn_cffi.api.quantization_report import sqnr_db

CONVOLUTIONS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "1d": (lambda: [nn.Conv1d(8, 16, 3), nn.GELU(), nn.Conv1d(16, 8, 3, stride=2, padding=1)], (2, 8, 21)),
    "1d, normalized": (
        lambda: [nn.Conv1d(8, 16, 3, bias=False), nn.BatchNorm1d(16), nn.Conv1d(16, 16, 3, groups=16)],
        (2, 8, 21),
    ),
    "3d": (lambda: [nn.Conv3d(3, 16, 3), nn.ReLU(), nn.Conv3d(16, 8, (1, 3, 3), dilation=2)], (2, 3, 5, 9, 8)),
    "3d, normalized, pooled": (
        lambda: [nn.Conv3d(3, 16, 3), nn.BatchNorm3d(16), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(16, 8, 1, bias=False)],
        (2, 3, 6, 9, 8),
    ),
    "3d, grouped": (lambda: [nn.Conv3d(8, 8, 3, groups=8), nn.Conv3d(8, 8, 1, groups=2)], (1, 8, 5, 6, 7)),
    "3d, padding by name": (
        lambda: [nn.Conv3d(3, 8, 3, padding="same"), nn.Conv3d(8, 8, 2, padding="same")],
        (2, 3, 5, 6, 7),
    ),
}


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_of_sequences_and_volumes_are_quantized(case: str) -> None:
    """torchao's quantizer sees those of images, and those of sequences where a relu follows."""
    torch.manual_seed(0)
    layers, shape = CONVOLUTIONS[case]
    model, x = nn.Sequential(*layers()).eval(), noise(*shape)
    module, report, converted = zendnn_cffi.quantize(model, [x], tune="off", compare=False)
    assert [layer.computes_in for layer in report.layers] == ["int8"] * 2
    y = noise(*shape, seed=1)
    with torch.no_grad():
        assert sqnr_db(model(x), module(x)) > 30
        assert sqnr_db(converted(y), module(y)) > 45  # a step of a scale here and there
    _, report, _ = zendnn_cffi.quantize(model, [x], dynamic=True, tune="off", compare=False)
    assert [layer.computes_in for layer in report.layers] == ["float32"] * 2
