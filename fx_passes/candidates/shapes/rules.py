"""What an operation makes of shapes, dtypes and strides: a rule a row, for what common models are made of.

A rule answers where the answer is clear, and raises Unclear elsewhere: integers that are promoted, channels-last
convolutions, empty tensors. Whoever asks then runs the plain-torch body on zeros, which knows everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fx_passes import ops
from fx_passes.candidates.shapes import elementwise, movement, products, recurrent, rows, windows
from fx_passes.candidates.shapes.spec import TensorSpec, Unclear, row_major
from fx_passes.graph.graph import ARITHMETIC

Rule = Callable[..., Any]


def _size(src: TensorSpec, dim: int | None = None) -> Any:
    shape = torch.Size(src.shape)
    return shape if dim is None else shape[dim]


def _rank(src: TensorSpec) -> int:
    return src.ndim


def _fold_bn_bias(
    bias: TensorSpec | None,
    mean: TensorSpec,
    var: TensorSpec,
    bn_weight: Any,
    bn_bias: Any,
    eps: float,
    like: TensorSpec,
) -> TensorSpec:
    return row_major(mean.shape, like.dtype)


def _add_channels(bias: TensorSpec | None, summand: TensorSpec, like: TensorSpec) -> TensorSpec:
    return row_major(like.shape[:1], like.dtype)


def _no_bias(weight: TensorSpec) -> TensorSpec:
    return row_major(weight.shape[:1], weight.dtype)


RULES: dict[Callable[..., Any], Rule] = {
    ops.size: _size,
    ops.rank: _rank,
    ops.eltwise: elementwise.eltwise,
    ops.binary: elementwise.binary,
    ops.prelu: elementwise.prelu,
    ops.quantize: elementwise.quantized,
    ops.dequantize: elementwise.quantized,
    ops.choose_scale: elementwise.chosen_scale,
    ops.quantize_by: elementwise.quantized_by,
    ops.choose_row_scales: elementwise.chosen_row_scales,
    ops.quantize_rows_by: elementwise.quantized_rows_by,
    ops.dequantize_rows_by: elementwise.quantized_rows_by,
    ops.rotary: elementwise.rotary,
    ops.fold_bn_weight: elementwise.scaled,
    ops.fold_bn_deconv_weight: elementwise.scaled,
    ops.fold_pre_bn_weight: elementwise.scaled,
    ops.scale_channels: elementwise.scaled,
    ops.fold_bn_bias: _fold_bn_bias,
    ops.add_channels: _add_channels,
    ops.no_bias: _no_bias,
    ops.convolution: windows.convolution,
    ops.deconvolution: windows.deconvolution,
    ops.pool: windows.pool,
    ops.adaptive_pool: windows.adaptive_pool,
    ops.resample: windows.resample,
    ops.weighted_samples: windows.weighted_samples,
    ops.pad: windows.padded,
    ops.linear: products.linear,
    ops.int4_linear: products.int4_linear,
    ops.dynamic_linear: products.dynamic_linear,
    ops.row_scaled_linear: products.row_scaled_linear,
    ops.matmul: products.matmul,
    ops.attention: products.attention,
    ops.cached_attention: products.attention,
    ops.holding: recurrent.holding,
    ops.recurrent: recurrent.recurrent,
    ops.recurrent_layer: recurrent.recurrent_layer,
    ops.recurrent_cell: recurrent.recurrent_cell,
    ops.selective_scan: recurrent.selective_scan,
    ops.selective_scan_and_state: recurrent.selective_scan_and_state,
    ops.batch_norm: rows.batch_norm,
    ops.layer_norm: rows.layer_norm,
    ops.group_norm: rows.group_norm,
    ops.softmax: rows.softmax,
    ops.rms_norm: rows.rms_norm,
    ops.l2_normalize: rows.l2_normalize,
    ops.reduce: rows.reduce,
    ops.embedding: rows.embedding,
    ops.take_rows: rows.take_rows,
    ops.concat: movement.concat,
    ops.roll: movement.roll,
    ops.grow: movement.grow,
    ops.write_at: movement.write_at,
    ops.reshape: movement.reshape,
    ops.reshape_as: movement.reshape_as,
    ops.flatten: movement.flatten,
    ops.unflatten: movement.unflatten,
    ops.contiguous: movement.contiguous,
    **{operation: movement.viewed(operation) for operation in movement.VIEWED},
}


def infer(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what target(*args, **kwargs) is, tensors as TensorSpecs in and out. Raises Unclear."""
    rule = RULES.get(target)
    if rule is None:
        if target not in ARITHMETIC or any(isinstance(argument, TensorSpec) for argument in args):
            raise Unclear
        return target(*args, **kwargs)
    if any(0 in spec.shape for spec in specs_in((args, kwargs))):
        raise Unclear
    try:
        return rule(*args, **kwargs)
    except Unclear:
        raise
    except Exception as error:  # a table as an index, say; what is wrong, the plain-torch body says better
        raise Unclear from error


def specs_in(argument: Any) -> list[TensorSpec]:
    """The TensorSpecs in nested lists, tuples and dictionaries."""
    if isinstance(argument, TensorSpec):
        return [argument]
    if isinstance(argument, list | tuple):
        return [spec for item in argument for spec in specs_in(item)]
    if isinstance(argument, Mapping):
        return [spec for item in argument.values() for spec in specs_in(item)]
    return []
