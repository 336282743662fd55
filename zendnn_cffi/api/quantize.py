"""quantize(): from a float model and calibration data to an optimized module that computes in 8-bit integers.

A thin front end: torch.export makes the graph, torchao's PT2E observes it and writes quantize and dequantize operators
into it, optimize() does the rest. The parts are in zendnn_cffi/api/quantization.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fx_passes.trace.submodules import detectors
from zendnn_cffi.api.quantization.calibrated import Calibrated, Options
from zendnn_cffi.api.quantization.checks import (
    accuracy_of,
    as_limit,
    as_model,
    check_limits,
    check_options,
    check_outputs,
)
from zendnn_cffi.api.quantization.choose import Limits
from zendnn_cffi.api.quantization.inputs import FIRST, call_of, calls_of, check_call, copied, kept_calls
from zendnn_cffi.api.quantization.pt2e import NotExported, calibrate, exported_graph, torchao
from zendnn_cffi.api.quantization.states import buffers_restored
from zendnn_cffi.api.quantization.submodules import Submodules
from zendnn_cffi.api.quantization_report import Quantization
from zendnn_cffi.primitives.allocation import on_cpu


def quantize(
    model: nn.Module | torch.export.ExportedProgram,
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

    model         in evaluation mode, of float32; not changed. An ExportedProgram, or what its module() returns, keeps
                  the sizes that were free in that export. Of a model that torch.export cannot follow, as a detector,
                  those submodules are quantized that it can.
    calibration   inputs like those to come, each a tensor, a sequence of positional or a mapping of keyword arguments.
                  All of them are run once. A hundred or so do.
    example_inputs  the example for torch.export, written like one of these (default: the first of them). It may take
                  sizes of 1 for fixed: give a batch of 2 where others are to come.
    dynamic       scales of activations are computed in each call, and only linear layers are quantized
    budget        least signal to noise ratio of the outputs over the calibration inputs (the first 64 of them), dB.
                  Layers stay float where they have to, those of the worst error for their time. Where submodules
                  are quantized one by one, of the results of each.
    accuracy      a function of yours that is called with modules like the model and returns a number, higher is better
    max_drop      how far that number may fall below the float model's; goes with accuracy
    correct_bias  take the mean shift that rounding causes out of each layer's result, by its bias
    smooth        move the spread of channels behind normalizations into the weights of linear layers (SmoothQuant)
    attention     queries and keys of attention are quantized, too (not with dynamic, nor without VNNI).
                  What follows scores is not. False: they stay float, for models whose keys have a few numbers far
                  beyond the others
    dtype         of what stays in floating point: torch.bfloat16 or None (float32)
    tune          as optimize() has it
    compare       whether both modules are run side by side, for the times in the report. Layers that are slower in
                  integers stay float then, unless tune is "off". False: all layers are quantized that can be
    Returns       Quantization: module, report, converted; weights have a scale for each output channel, activations
                  one. Where integers make nothing faster, the module is the float model. With budget or accuracy, the
                  module keeps to them, if need be as the float model, in float32.
    Raises        ImportError without torchao; ValueError for a model in training mode, of another dtype or device, one
                  that was optimized, or that torch.export cannot follow in any part, for NaN in it or in calibration
                  data, for data that are none or no calls of it, for bad options and limits, and for a budget of
                  outputs that are all zeros or no floating point numbers; TypeError. Options and the model are
                  looked at before anything is computed. TimeoutError and errors of your own classes, as from a signal
                  handler, come through as they are.
    """
    model = as_model(model)
    budget, max_drop = as_limit(budget, "budget"), as_limit(max_drop, "max_drop")
    check_limits(budget, accuracy, max_drop)
    flags = {"dynamic": dynamic, "correct_bias": correct_bias, "smooth": smooth, "attention": attention}
    check_options(dtype, tune, compare=compare, **flags)
    options = Options(dynamic, correct_bias, smooth, attention, dtype, tune, compare)
    example = None if example_inputs is None else call_of(example_inputs, "example_inputs")
    pt2e = torchao()
    calls = calls_of(calibration)
    kept = kept_calls(calls, copies=not isinstance(calibration, list | tuple))
    with on_cpu(), buffers_restored(model):
        with torch.no_grad(), buffers_restored(model):
            limits = Limits(budget, accuracy, max_drop or 0.0, accuracy_of(model, accuracy))
        first = (kept[0], FIRST) if example is None else (example, "example_inputs")
        try:
            if detectors(model):
                check_call(model, *first)
                raise NotExported(f"{type(model).__name__} is a detector with no part that torch.export can follow")
            exported = exported_graph(model, *first)
        except NotExported as refused:
            submodules = Submodules(model, first[0], kept, refused)
            return submodules.quantized(calls, limits, pt2e, options)
        check_outputs(exported, budget)
        graph = Calibrated(model, exported, kept, pt2e, options)
        others = map(copied, calls) if graph.written else calls
        with torch.no_grad():
            calibrate(graph.prepared, itertools.chain(graph.kept, others))
            attempt = graph.attempt(limits)
            report = attempt.report(compare)
            for module in (attempt.fast, attempt.converted):
                graph.state.restore(module)
            return Quantization(attempt.fast, report, attempt.converted)
