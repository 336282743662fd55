"""Linear layers of integers, as torchao's quantize_() makes them: their weight is an Int8Tensor, or one of fewer bits.

    Before: linear(x, weight, bias)
    After:  chosen = choose_row_scales(x); kept = quantize_rows_by(x, chosen)
            row_scaled_linear(kept, chosen, dequantize(weight.qdata, weight.scale), bias)

So it is with scales of the call for each row; with one scale, choose_scale and dynamic_linear take their places.
Weights alone in integers are dequantized once, and the layer computes in float.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fx_passes import ops
from fx_passes.graph.int8_tensor import Weight, understood
from fx_passes.spellings.registry import Built, Call, spelled


def linear(input: Any, weight: torch.Tensor, part: Callable[[str], Any], bias: Any) -> Built:
    """The layer of an Int8Tensor; part gives the node of one of its tensors. None where it is not understood."""
    known = understood(weight)
    if known is None:
        return None
    return layer(
        input, part("qdata"), part("scale"), part("zero_point") if known.has_zero_points else None, bias, known
    )


@spelled(qualified=["torch._ops.zendnn_cffi.int8_linear.default"])
def int8_linear(
    input: Any,
    qdata: Any,
    scale: Any,
    zero_point: Any,
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
    return layer(input, qdata, scale, zero_point, bias, Weight.of_numbers(axis, how, by_rows, low, high, dtype, eps))


def layer(input: Any, qdata: Any, scale: Any, zero_point: Any, bias: Any, known: Weight) -> Call:
    """The layer of these tensors."""
    dtype = torch.float32 if known.how else known.dtype
    real = Call(ops.dequantize, (qdata, scale, zero_point, known.axis, dtype))
    if not known.how:
        return Call(ops.linear, (input, real, bias), {"post_ops": ()})
    of = {"of": known.dtype}
    if known.by_rows:
        chosen = Call(ops.choose_row_scales, (input, known.how, *known.limits, known.eps), of)
        kept = Call(ops.quantize_rows_by, (input, chosen, *known.limits, torch.int8))
        rounded = {} if known.dtype == dtype else {"dtype": known.dtype}
        return Call(ops.row_scaled_linear, (kept, chosen, real, bias), {"post_ops": (), **rounded})
    chosen = Call(ops.choose_scale, (input, *known.limits, known.eps, torch.int8, known.how == "symmetric"), of)
    kept = Call(ops.quantize_by, (input, chosen, *known.limits, torch.int8))
    return Call(ops.dynamic_linear, (kept, chosen, real, bias), {"post_ops": ()})


def evaluate(built: Any) -> Any:
    """What a Call over tensors computes."""
    if not isinstance(built, Call):
        return built
    return built.op(*map(evaluate, built.args), **built.kwargs)
