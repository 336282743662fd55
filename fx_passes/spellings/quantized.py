"""Quantizing and dequantizing, as torchao's PT2E and torch.ao write them: operators of quantized_decomposed.

Named by qualified name: PyTorch registers them when the library that makes such graphs is imported.
"""

from __future__ import annotations

from typing import Any

import torch

from fx_passes import ops
from fx_passes.ops.quantized import TOKEN
from fx_passes.spellings.registry import Built, Call, spelled

_OPERATORS = "torch._ops.quantized_decomposed"


@spelled(qualified=[f"{_OPERATORS}.quantize_per_tensor.{form}" for form in ("default", "tensor", "tensor2")])
def quantize_per_tensor(
    input: Any, scale: Any, zero_point: Any, quant_min: Any, quant_max: Any, dtype: torch.dtype
) -> Built:
    return Call(ops.quantize, (input, scale, zero_point, None, quant_min, quant_max, dtype))


@spelled(qualified=[f"{_OPERATORS}.quantize_per_channel.default"])
def quantize_per_channel(
    input: Any, scales: Any, zero_points: Any, axis: int, quant_min: Any, quant_max: Any, dtype: torch.dtype
) -> Built:
    return Call(ops.quantize, (input, scales, zero_points, axis, quant_min, quant_max, dtype))


@spelled(qualified=[f"{_OPERATORS}.quantize_per_token.default"])
def quantize_per_token(
    input: Any, scales: Any, zero_points: Any, quant_min: Any, quant_max: Any, dtype: torch.dtype
) -> Built:
    return Call(ops.quantize, (input, scales, zero_points, TOKEN, quant_min, quant_max, dtype))


@spelled(qualified=[f"{_OPERATORS}.dequantize_per_tensor.{form}" for form in ("default", "tensor", "tensor2")])
def dequantize_per_tensor(
    input: Any,
    scale: Any,
    zero_point: Any,
    quant_min: Any,
    quant_max: Any,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Built:
    return Call(ops.dequantize, (input, scale, zero_point, None, out_dtype or torch.float32))


@spelled(qualified=[f"{_OPERATORS}.dequantize_per_channel.default"])
def dequantize_per_channel(
    input: Any,
    scales: Any,
    zero_points: Any,
    axis: int,
    quant_min: Any,
    quant_max: Any,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Built:
    return Call(ops.dequantize, (input, scales, zero_points, axis, out_dtype or torch.float32))


@spelled(qualified=[f"{_OPERATORS}.dequantize_per_token.default"])
def dequantize_per_token(
    input: Any,
    scales: Any,
    zero_points: Any,
    quant_min: Any,
    quant_max: Any,
    dtype: torch.dtype,
    output_dtype: torch.dtype,
) -> Built:
    return Call(ops.dequantize, (input, scales, zero_points, TOKEN, output_dtype))
