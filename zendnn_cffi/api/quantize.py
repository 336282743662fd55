"""quantize(): from a float model and calibration data to an optimized module that computes in 8-bit integers.

A thin front end: torch.export makes the graph, torchao's PT2E observes it and writes quantize and dequantize operators
into it, optimize() does the rest. The parts are in zendnn_cffi/api/quantization.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from zendnn_cffi.api.quantization.attempt import Attempt
from zendnn_cffi.api.quantization.attention import mark_attention
from zendnn_cffi.api.quantization.choose import Limits
from zendnn_cffi.api.quantization.gates import share_observers
from zendnn_cffi.api.quantization.inputs import call_of, calls_of, kept_calls
from zendnn_cffi.api.quantization.pt2e import calibrate, exported_graph, torchao
from zendnn_cffi.api.quantization.smooth import smooth_linears
from zendnn_cffi.api.quantization_report import QuantizationReport


class Quantization(NamedTuple):
    """What quantize() returns.

    module     the optimized module
    report     a row for each layer, and the whole
    converted  the graph with quantize and dequantize operators, which torch.export.export takes and torch.export.save
               saves
    """

    module: fx.GraphModule
    report: QuantizationReport
    converted: fx.GraphModule


def quantize(
    model: nn.Module,
    calibration: Iterable[Any],
    *,
    example_inputs: Any = None,
    dynamic: bool = False,
    budget: float | None = None,
    accuracy: Callable[[Any], float] | None = None,
    max_drop: float | None = None,
    correct_bias: bool = True,
    smooth: bool = True,
    attention: bool = True,
    dtype: torch.dtype | None = None,
    tune: str = "auto",
    compare: bool = True,
) -> Quantization:
    """Return the model with weights and activations in 8-bit integers, optimized, with a report.

    model         in evaluation mode, of float32; not changed
    calibration   inputs like those to come, each a tensor, a sequence of positional or a mapping of keyword arguments.
                  All of them are run once. A hundred or so do.
    example_inputs  the example for torch.export, written like one of these (default: the first of them). It may take
                  sizes of 1 for fixed: give a batch of 2 where others are to come.
    dynamic       scales of activations are computed in each call, and only linear layers are quantized
    budget        least signal to noise ratio of the outputs over the calibration inputs (the first 64 of them), dB.
                  Layers stay float where they have to, those of the worst error for their time.
    accuracy      a function of yours that is called with modules like the model and returns a number, higher is better
    max_drop      how far that number may fall below the float model's; goes with accuracy
    correct_bias  take the mean shift that rounding causes out of each layer's result, by its bias
    smooth        move the spread of channels behind normalizations into the weights of linear layers (SmoothQuant)
    attention     queries and keys of attention are quantized, too (not with dynamic); what follows scores is not.
                  False: they stay float, for models whose keys have a few numbers far beyond the others
    dtype         of what stays in floating point: torch.bfloat16 or None (float32)
    tune          as optimize() has it
    compare       whether both modules are run side by side, for the times in the report
    Returns       Quantization: module, report, converted; weights have a scale for each output channel, activations
                  one. With budget or accuracy, the module keeps to them, if need be as the float model, in float32.
    Raises        ImportError without torchao; ValueError for a model in training mode, one of another dtype, or one
                  that torch.export cannot follow, for calibration data that are none or no calls of it, or hold NaN,
                  and for bad limits; TypeError
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if model.training:
        raise ValueError("model is in training mode: quantize() is for inference, call model.eval() first")
    _check_dtype(model)
    _check_limits(budget, accuracy, max_drop)
    pt2e = torchao()
    calls = calls_of(calibration)
    kept = kept_calls(calls)
    if not kept:
        raise ValueError(
            "calibration is empty: give inputs like those to come, each a tensor or a sequence of arguments"
        )
    with _buffers_restored(model):
        if example_inputs is None:
            exported = exported_graph(model, kept[0])
        else:
            exported = exported_graph(model, call_of(example_inputs), "example_inputs")
        if smooth:
            smooth_linears(exported, kept)
        if attention and not dynamic:
            mark_attention(exported)
        prepared = pt2e.prepare(exported, dynamic)
        share_observers(prepared)
        with torch.no_grad():
            calibrate(prepared, kept, calls)
            attempt = Attempt(model, pt2e, prepared, kept, dtype, tune)
            if correct_bias:
                attempt.correct_biases()
            if budget is None and accuracy is None:
                attempt.compile(None)
            else:
                float_accuracy = 0.0 if accuracy is None else float(accuracy(model))
                if not math.isfinite(float_accuracy):
                    raise ValueError(f"accuracy of the float model must be a finite number, got {float_accuracy}")
                attempt.search(Limits(budget, accuracy, max_drop or 0.0, float_accuracy))
            return Quantization(attempt.fast, attempt.report(compare), attempt.converted)


@contextmanager
def _buffers_restored(model: nn.Module) -> Iterator[None]:
    """Leave buffers that forward writes to, such as counters, as they were: calibration calls it many times."""
    held = [buffer for buffer in model.buffers() if type(buffer) is torch.Tensor and buffer.layout is torch.strided]
    before = [buffer.clone() for buffer in held]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, was in zip(held, before, strict=True):
                if not torch.equal(buffer, was):
                    buffer.copy_(was)


def _check_dtype(model: nn.Module) -> None:
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    for path, module in model.named_modules():
        dtype = module.weight.dtype if isinstance(module, layers) else torch.float32
        if dtype in (torch.float16, torch.bfloat16, torch.float64):
            name = f"{path}.weight".lstrip(".")
            raise ValueError(f"quantize() is for models of float32, and {name} is {dtype}: call model.float() first")


def _check_limits(budget: Any, accuracy: Any, max_drop: Any) -> None:
    for name, value in (("budget", budget), ("max_drop", max_drop)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise TypeError(f"{name} must be a number or None, got {type(value).__name__}")
    if budget is not None and math.isnan(budget):
        raise ValueError("budget is not a number: give the least signal to noise ratio in dB, such as 30")
    if accuracy is not None and not callable(accuracy):
        raise TypeError(f"accuracy must be a function of a module, got {type(accuracy).__name__}")
    if (accuracy is None) != (max_drop is None):
        raise ValueError("accuracy and max_drop go together: how the model is judged, and how far it may fall")
    if max_drop is not None and not max_drop >= 0:
        raise ValueError(f"max_drop must be at least 0, got {max_drop}")
