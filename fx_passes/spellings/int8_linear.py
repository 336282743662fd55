"""Linear layers of integers, as torchao's quantize_() makes them: their weight is an Int8Tensor, or one of fewer bits.

    Before: linear(x, weight, bias)
    After:  chosen = choose_row_scales(x); kept = quantize_rows_by(x, chosen)
            row_scaled_linear(kept, chosen, dequantize(weight.qdata, weight.scale), bias)

So it is with scales of the call for each row; with one scale, choose_scale and dynamic_linear take their places.
A scale that the weight has (static) is that of ops.quantize and ops.dequantize before ops.linear. An input that is
scaled before it is quantized (SmoothQuant) is a product.
Weights alone in integers are dequantized once, and the layer computes in float. So it does in bf16 where rows have zero
points: torchao multiplies floats there, and PyTorch rounds the input as it does (rounded_rows).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fx_passes import ops
from fx_passes.graph.int8_tensor import PARTS, STATIC, Weight, understood
from fx_passes.spellings.registry import Built, Call, spelled


def linear(input: Any, weight: torch.Tensor, part: Callable[[str], Any], bias: Any, is_known: bool) -> Built:
    """The layer of an Int8Tensor; None where it is not understood.

    part      gives the node of one of its tensors
    is_known  whether the input's dtype is, and is the weight's: what is scaled first would take another one
    """
    known = understood(weight)
    if known is None or (known.more and not is_known):
        return None
    return layer(input, {name: part(name) for name in known.parts}, bias, known)


@spelled(qualified=["torch._ops.zendnn_cffi.int8_linear.default"])
def int8_linear(
    input: Any,
    qdata: Any,
    scale: Any,
    zero_point: Any,
    act_pre_scale: Any,
    act_quant_scale: Any,
    act_quant_zero_point: Any,
    bias: Any,
    axis: Sequence[int],
    how: str,
    by_rows: bool,
    low: int,
    high: int,
    dtype: torch.dtype,
    eps: float,
) -> Built:
    """As fx_passes.trace.quantized_layers writes it."""
    tensors = (qdata, scale, zero_point, act_pre_scale, act_quant_scale, act_quant_zero_point)
    known = Weight.of_numbers(axis, how, by_rows, low, high, dtype, eps)
    return layer(input, dict(zip(PARTS, tensors, strict=True)), bias, known)


def layer(input: Any, tensors: Mapping[str, Any], bias: Any, known: Weight) -> Call:
    """The layer of these tensors, by their names in the weight."""
    dtype = torch.float32 if known.how and not known.rounds_in_torch else known.dtype
    real = Call(ops.dequantize, (tensors["qdata"], tensors["scale"], tensors.get("zero_point"), known.axis, dtype))
    if (factor := tensors.get("act_pre_scale")) is not None:
        input = Call(ops.binary, (input, factor, "mul"))
    if not known.how:
        return Call(ops.linear, (input, real, bias), {"post_ops": ()})
    if known.how.startswith(STATIC):
        scale, zero_point = tensors["act_quant_scale"], tensors.get("act_quant_zero_point")
        shift = 0 if zero_point is None else zero_point
        kept = Call(ops.quantize, (input, scale, shift, None, *known.limits, torch.int8))
        taken = zero_point if known.how.endswith("asymmetric") else None  # as torchao has it
        rounded = Call(ops.dequantize, (kept, scale, taken, None, dtype))
        return Call(ops.linear, (rounded, real, bias), {"post_ops": ()})
    of = {"of": known.dtype}
    if known.rounds_in_torch:
        rounded = Call(ops.rounded_rows, (input, known.how, *known.limits, known.eps), of)
        return Call(ops.linear, (rounded, real, bias), {"post_ops": ()})
    if known.by_rows:
        chosen = Call(ops.choose_row_scales, (input, known.how, *known.limits, known.eps), of)
        kept = Call(ops.quantize_rows_by, (input, chosen, *known.limits, torch.int8))
        narrow = {} if known.dtype == dtype else {"dtype": known.dtype}
        return Call(ops.row_scaled_linear, (kept, chosen, real, bias), {"post_ops": (), **narrow})
    chosen = Call(ops.choose_scale, (input, *known.limits, known.eps, torch.int8, known.how == "symmetric"), of)
    kept = Call(ops.quantize_by, (input, chosen, *known.limits, torch.int8))
    return Call(ops.dynamic_linear, (kept, chosen, real, bias), {"post_ops": ()})


def evaluate(built: Any) -> Any:
    """What a Call over tensors computes."""
    if not isinstance(built, Call):
        return built
    return built.op(*map(evaluate, built.args), **built.kwargs)
