"""Models whose linear layers torchao's quantize_() made layers of integers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerAxis,
    PerGroup,
    PerRow,
    PerTensor,
    quantize_,
)

from tests.support.exported import needs_export

DYNAMIC: dict[str, Callable[[], Any]] = {
    "rows": Int8DynamicActivationInt8WeightConfig,
    "rows, one scale of the weight": lambda: Int8DynamicActivationInt8WeightConfig(granularity=[PerRow(), PerTensor()]),
    "rows, asymmetric": lambda: Int8DynamicActivationInt8WeightConfig(act_mapping_type=MappingType.ASYMMETRIC),
    "rows, reduced": lambda: Int8DynamicActivationInt8WeightConfig(reduce_range=True),
    "whole": lambda: Int8DynamicActivationInt8WeightConfig(granularity=PerTensor()),
    "whole, asymmetric": lambda: Int8DynamicActivationInt8WeightConfig(
        granularity=PerTensor(), act_mapping_type=MappingType.ASYMMETRIC
    ),
    "rows, asymmetric, 4 bits": lambda: Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerAxis(0)
    ),
}
WEIGHTS_ALONE: dict[str, Callable[[], Any]] = {
    "outputs": Int8WeightOnlyConfig,
    "one scale": lambda: Int8WeightOnlyConfig(granularity=PerTensor()),
    "groups": lambda: Int8WeightOnlyConfig(granularity=PerGroup(16)),
    "groups, 4 bits": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16)),
    "float8": Float8WeightOnlyConfig,
    "outputs, 3 bits, asymmetric": lambda: IntxWeightOnlyConfig(
        weight_dtype=torch.int3, granularity=PerAxis(0), mapping_type=MappingType.ASYMMETRIC
    ),
}
ROUNDED_ROWS: dict[str, Callable[[], Any]] = {  # and products of floats, as groups have scales of their own
    "rows, asymmetric, groups of 4 bits": lambda: Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(16)
    ),
}
CONFIGS = DYNAMIC | WEIGHTS_ALONE | ROUNDED_ROWS


class Block(nn.Module):
    """Two layers with a GELU between them, one without a bias; with a question that torch.fx cannot follow."""

    def __init__(self, features: int = 64, hidden: int = 48, *, asks: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(features, hidden), nn.Linear(hidden, features, bias=False)
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.nn.functional.gelu(self.up(x)))
        if self.asks and needs_export(x) and x.shape[0] > 1:
            y = y * 2
        return y.tanh()


def quantized(model: nn.Module, config: str = "rows", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A copy of model in dtype, its linear layers quantized."""
    made = copy.deepcopy(model).eval().to(dtype)
    quantize_(made, CONFIGS[config]())
    return made


def block(config: str = "rows", dtype: torch.dtype = torch.float32, *, asks: bool = False, seed: int = 0) -> nn.Module:
    """A quantized Block of the same weights for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return quantized(Block(asks=asks), config, dtype)


def scaled(how: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A quantized Block whose layers scale or quantize inputs [.., .., features] by numbers of their own.

    how  words of: factor, static, zeros, asymmetric, alone
    """
    model: Any = block("outputs" if "alone" in how else "whole, asymmetric" if "asymmetric" in how else "whole", dtype)
    if "rows" in how:
        model = block("rows", dtype)
    for layer in (model.up, model.down):
        weight, size = layer.weight, layer.in_features
        if "factor" in how:
            weight.act_pre_scale = torch.linspace(0.5, 2.0, size, dtype=dtype)
        if "static" in how:
            weight.act_quant_scale = torch.full((1, 1, 1), 0.04)
        if "zeros" in how or "asymmetric" in how:
            number = 11 if "asymmetric" in how else 0
            weight.act_quant_zero_point = torch.full((1, 1, 1), number, dtype=torch.int8)
    return model
