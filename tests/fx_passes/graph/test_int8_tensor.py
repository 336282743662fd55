"""What Int8Tensors say, and near misses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fx_passes.graph.int8_tensor import Weight, is_int8_tensor, understood
from tests.support.int8_tensors import CONFIGS, quantized

F32, BF16 = torch.float32, torch.bfloat16
EXPECTED = {
    "rows": Weight(0, "symmetric", True, (-128, 127), F32),
    "rows, one scale of the weight": Weight(None, "symmetric", True, (-128, 127), F32),
    "rows, asymmetric": Weight(0, "asymmetric", True, (-128, 127), F32),
    "rows, reduced": Weight(0, "symmetric", True, (-64, 63), F32),
    "whole": Weight(None, "symmetric", False, (-128, 127), F32),
    "whole, asymmetric": Weight(None, "asymmetric", False, (-128, 127), F32),
    "outputs": Weight(0, "", False, (-128, 127), F32),
    "one scale": Weight(None, "", False, (-128, 127), F32),
    "groups": Weight((1, 16), "", False, (-128, 127), F32),
    "rows, asymmetric, 4 bits": Weight((1, 32), "asymmetric", True, (-128, 127), F32, torch.finfo(F32).tiny),
    "rows, asymmetric, groups of 4 bits": Weight((1, 16), "asymmetric", True, (-128, 127), F32, torch.finfo(F32).tiny),
    "groups, 4 bits": Weight((1, 16), "", False, (-128, 127), F32),
    "float8": Weight((1, 32), "", False, (-128, 127), F32, is_float8=True),
    "outputs, 3 bits, asymmetric": Weight((1, 32), "", False, (-128, 127), F32),
}


def weight_of(config: str, dtype: torch.dtype = F32) -> Any:
    return quantized(nn.Linear(32, 24), config, dtype).weight


@pytest.mark.parametrize("config", CONFIGS)
def test_every_configuration(config: str) -> None:
    weight = weight_of(config)
    assert is_int8_tensor(weight) and understood(weight) == EXPECTED[config]
    told = Weight.of_numbers(*EXPECTED[config].numbers)  # which tensors there are is known besides
    assert told._replace(is_float8=EXPECTED[config].is_float8) == EXPECTED[config]


IN_BF16 = ["rows", "rows, reduced", "outputs", "one scale", "groups", "groups, 4 bits", "rows, asymmetric, 4 bits",
           "float8"]  # fmt: skip


@pytest.mark.parametrize("config", IN_BF16)
def test_bf16(config: str) -> None:
    assert understood(weight_of(config, BF16)) == EXPECTED[config]._replace(dtype=BF16)


@pytest.mark.parametrize("config", ["rows, asymmetric", "whole", "whole, asymmetric"])
def test_bf16_without_primitives(config: str) -> None:
    assert understood(weight_of(config, BF16)) is None


def _scaled_before(weight: Any) -> None:
    weight.act_pre_scale = torch.ones(24)


def _static(weight: Any) -> None:
    weight.act_quant_scale = torch.ones(1, 1)


def _rows_of_another_dimension(weight: Any) -> None:
    rows = copy.copy(weight.act_quant_kwargs.granularity)  # all layers have one
    object.__setattr__(rows, "dim", 0)
    weight.act_quant_kwargs = dataclasses.replace(weight.act_quant_kwargs, granularity=rows)


def _three_dimensions(weight: Any) -> None:
    weight.qdata = weight.qdata[None]


@pytest.mark.parametrize("change", [_scaled_before, _static, _rows_of_another_dimension, _three_dimensions])
def test_near_misses(change: Callable[[Any], None]) -> None:
    weight = weight_of("rows")
    change(weight)
    assert is_int8_tensor(weight) and understood(weight) is None


def _other_activations(weight: Any) -> None:
    weight.activation_quantization = "another"


def _half(weight: Any) -> None:
    weight.scale = weight.scale.half()


@pytest.mark.parametrize("change", [_other_activations, _half, _three_dimensions])
def test_near_misses_of_fewer_bits(change: Callable[[Any], None]) -> None:
    weight = weight_of("rows, asymmetric, 4 bits")
    change(weight)
    assert is_int8_tensor(weight) and understood(weight) is None


def _quantized_input(weight: Any) -> None:
    weight.act_quant_kwargs = object()


def _other_scales(weight: Any) -> None:
    weight.scale = weight.scale[:3]


@pytest.mark.parametrize("change", [_quantized_input, _other_scales, _half, _three_dimensions])
def test_near_misses_of_float8(change: Callable[[Any], None]) -> None:
    weight = weight_of("float8")
    change(weight)
    assert is_int8_tensor(weight) and understood(weight) is None


def test_other_tensors() -> None:
    for other in (torch.ones(2), nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.int8), None):
        assert not is_int8_tensor(other) and understood(other) is None
