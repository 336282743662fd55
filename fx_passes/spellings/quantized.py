"""Quantizing and dequantizing, as PT2E and torch.ao write them (quantized_decomposed), and torchao (affine, by blocks).

Named by qualified name: they are registered when the library that makes such graphs is imported.
"""

from __future__ import annotations

from typing import Any

import torch

from fx_passes import ops
from fx_passes.ops.quantized import TOKEN
from fx_passes.spellings.registry import Built, Call, spelled

_OPERATORS = "torch._ops.quantized_decomposed"
_AFFINE = "torch._ops.torchao"
_FORMS = ("", ".default", ".tensor", ".tensor2")
_KEPT = (torch.uint8, torch.int8, torch.int16, torch.int32)  # others stand for fewer bits, or are no integers


@spelled(qualified=[f"{_OPERATORS}.quantize_per_tensor{form}" for form in _FORMS])
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


@spelled(qualified=[f"{_OPERATORS}.dequantize_per_tensor{form}" for form in _FORMS])
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


@spelled(qualified=[f"{_AFFINE}.quantize_affine.default"])
def quantize_affine(
    input: Any,
    block_size: Any,
    scale: Any,
    zero_point: Any,
    output_dtype: torch.dtype,
    quant_min: Any = None,
    quant_max: Any = None,
) -> Built:
    sizes = _sizes(block_size)
    if sizes is None or zero_point is None or output_dtype not in _KEPT:
        return None
    limits = torch.iinfo(output_dtype)
    low = limits.min if quant_min is None else quant_min
    high = limits.max if quant_max is None else quant_max
    return Call(ops.quantize, (input, scale, zero_point, sizes, low, high, output_dtype))


@spelled(qualified=[f"{_AFFINE}.dequantize_affine.default"])
def dequantize_affine(
    input: Any,
    block_size: Any,
    scale: Any,
    zero_point: Any,
    input_dtype: torch.dtype,
    quant_min: Any = None,
    quant_max: Any = None,
    output_dtype: torch.dtype = torch.float32,
) -> Built:
    sizes = _sizes(block_size)
    if sizes is None or input_dtype not in _KEPT:
        return None
    return Call(ops.dequantize, (input, scale, zero_point, sizes, output_dtype))


def _sizes(block_size: Any) -> tuple[int, ...] | None:
    """The sizes of a block; None where one is computed."""
    is_known = isinstance(block_size, list | tuple) and all(type(size) is int for size in block_size)
    return tuple(block_size) if is_known else None
