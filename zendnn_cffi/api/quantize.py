"""quantize(): from a float model and calibration data to an optimized module that computes in 8-bit integers.

A thin front end: torch.export makes the graph, torchao's PT2E observes it and writes quantize and dequantize operators
into it, optimize() does the rest.
"""

from __future__ import annotations

import copy
import logging
import statistics
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from zendnn_cffi.api.optimize import optimize
from zendnn_cffi.api.quantization_report import INT8, LayerReport, QuantizationReport, sqnr_db

log = logging.getLogger("zendnn_cffi.quantize")

_PRODUCTS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution linear matmul bmm"
_ROUNDS, _ENOUGH_SECONDS = 15, 5.0
_Call = tuple[tuple[Any, ...], dict[str, Any]]


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
    dynamic: bool = False,
    dtype: torch.dtype | None = None,
    tune: str = "auto",
    compare: bool = True,
) -> Quantization:
    """Return the model with weights and activations in 8-bit integers, optimized, with a report.

    model        in evaluation mode, of float32; not changed
    calibration  inputs like those to come, each a tensor, a sequence of positional or a mapping of keyword arguments.
                 All of them are run once. A hundred or so do; the first is also the example for torch.export, which
                 may take sizes of 1 for fixed: give it a batch of 2 where others are to come.
    dynamic      scales of activations are computed in each call, and only linear layers are quantized
    dtype        of what stays in floating point: torch.bfloat16 or None (float32)
    tune         as optimize() has it
    compare      whether both modules are run side by side, for the times in the report
    Returns      Quantization: module, report, converted; weights have a scale for each output channel, activations one
    Raises       ImportError without torchao; ValueError for a model in training mode, one that torch.export cannot
                 follow, and for no calibration data; TypeError
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if model.training:
        raise ValueError("model is in training mode: quantize() is for inference, call model.eval() first")
    pt2e = _torchao()
    calls = _calls(calibration)
    example = next(calls, None)
    if example is None:
        raise ValueError(
            "calibration is empty: give inputs like those to come, each a tensor or a sequence of arguments"
        )
    prepared = pt2e.prepare(_exported(model, example), dynamic)
    with torch.no_grad():
        _calibrate(prepared, example, calls)
        reference = copy.deepcopy(prepared)  # in float, its batch normalizations folded
        converted = pt2e.convert(prepared)
        args, kwargs = example
        inputs: Any = kwargs if kwargs and not args else args
        fast = optimize(converted, inputs, dtype=dtype, tune=tune)
        result = fast(*args, **kwargs)
        fast(*args, **kwargs)
        times_ms = _compared(model, fast, example, dtype, tune) if compare else (None, None)
        layers = _layers(reference, converted, fast, example)
        total = sqnr_db(model(*args, **kwargs), result)
    report = QuantizationReport(type(model).__name__, tuple(layers), total, *times_ms)
    if times_ms[0] is not None and times_ms[1] is not None and times_ms[1] > times_ms[0]:
        log.warning("%s is not faster in integers: %.3f ms against %.3f", type(model).__name__, *reversed(times_ms))
    return Quantization(fast, report, converted)


class _Pt2e:
    """torchao's functions, with its quantizer for x86."""

    def __init__(self) -> None:
        from torchao.quantization.pt2e import quantize_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer

        self._functions, self._x86 = quantize_pt2e, x86_inductor_quantizer

    def prepare(self, exported: fx.GraphModule, dynamic: bool) -> fx.GraphModule:
        quantizer = self._x86.X86InductorQuantizer()
        quantizer.set_global(self._x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
        prepared: fx.GraphModule = self._functions.prepare_pt2e(exported, quantizer)
        return prepared

    def convert(self, prepared: fx.GraphModule) -> fx.GraphModule:
        converted: fx.GraphModule = self._functions.convert_pt2e(prepared)
        return converted


def _torchao() -> _Pt2e:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Pt2e()
    except ImportError as error:
        raise ImportError("quantize() needs torchao: pip install torchao, or zendnn_cffi[quant]") from error


def _calls(calibration: Iterable[Any]) -> Any:
    """Each input as positional and keyword arguments."""
    if isinstance(calibration, torch.Tensor | str | Mapping) or not isinstance(calibration, Iterable):
        kind = type(calibration).__name__
        raise TypeError(f"calibration must be an iterable of inputs, such as a list or a DataLoader, got {kind}")
    for each in calibration:
        if isinstance(each, torch.Tensor):
            yield (each,), {}
        elif isinstance(each, Mapping):
            yield (), dict(each)
        elif isinstance(each, Sequence) and not isinstance(each, str):
            yield tuple(each), {}
        else:
            raise TypeError(f"calibration inputs are tensors, sequences or mappings, got {type(each).__name__}")


def _exported(model: nn.Module, example: _Call) -> fx.GraphModule:
    """The model's graph, with as many sizes free as can be."""
    from fx_passes.trace.export import attempts

    args, kwargs = example
    refused: Exception | None = None
    for _, make_shapes, mode in attempts():
        try:
            shapes = None if make_shapes is None else make_shapes(model, example)
            with torch.no_grad(), mode, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=True)
                exported: fx.GraphModule = program.module()
                exported.graph.eliminate_dead_code()  # torchao's quantizer fails on layers that nobody reads
                exported.recompile()
                return exported
        except Exception as error:  # whatever the model's own code or torch.export raises
            refused = error
    reason = str(refused).partition("\n")[0]
    raise ValueError(
        f"torch.export cannot follow {type(model).__name__}: {type(refused).__name__}: {reason}"
    ) from refused


def _calibrate(prepared: fx.GraphModule, example: _Call, calls: Iterable[_Call]) -> None:
    from fx_passes.search.progress import ProgressBar

    with ProgressBar("zendnn_cffi: calibrating") as show:
        for number, (args, kwargs) in enumerate((example, *calls), 1):
            prepared(*args, **kwargs)
            show(number, number)


class _Watched(fx.Interpreter):
    """Runs a graph, and hands on what each layer returns."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.results: dict[str, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function" and isinstance(value, torch.Tensor) and _kind(n) in _PRODUCTS.split():
            self.results[n.name] = value
        return value


def _kind(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", getattr(node.target, "__name__", "")))


def _layers(reference: fx.GraphModule, converted: fx.GraphModule, fast: Any, example: _Call) -> Iterable[LayerReport]:
    """A row for each layer: how near it is to the float one, with all layers before it quantized, too."""
    args, kwargs = example
    float_run, integer_run = _Watched(reference), _Watched(converted)
    float_run.run(*args, *kwargs.values())
    integer_run.run(*args, *kwargs.values())
    dtypes = {
        call.name: call.dtype
        for region in fast.regions().values()
        for lowered in region.lowered.values()
        if lowered is not None
        for call in lowered.program.calls
        if call.implementation != "torch" or call.dtype not in (torch.int8, torch.uint8)  # it computes in float
    }
    sources = {node.name: str(node.meta.get("nn_module_stack") and _path(node)) for node in converted.graph.nodes}
    kinds = {node.name: _kind(node) for node in converted.graph.nodes}
    for name, value in integer_run.results.items():
        if name in float_run.results:
            computed = dtypes.get(name)
            where = INT8 if computed in (torch.int8, torch.uint8) else str(computed or "plain PyTorch")
            near = sqnr_db(float_run.results[name], value)
            yield LayerReport(name, sources[name], kinds[name], near, where.removeprefix("torch."))


def _path(node: fx.Node) -> str:
    """The submodule that a node comes from."""
    path: str = list(node.meta["nn_module_stack"].values())[-1][0]
    return path.removeprefix("L['self'].")


def _compared(
    model: nn.Module, fast: nn.Module, example: _Call, dtype: torch.dtype | None, tune: str
) -> tuple[float, float]:
    """Milliseconds of the float model, optimized, and of the quantized one: medians of calls that take turns."""
    args, kwargs = example
    plain = optimize(model, kwargs if kwargs and not args else args, dtype=dtype, tune=tune)
    times: tuple[list[float], list[float]] = ([], [])
    plain(*args, **kwargs)
    begun = time.perf_counter()
    for number in range(_ROUNDS):
        if number > 2 and time.perf_counter() - begun > _ENOUGH_SECONDS:
            break
        for module, found in zip((plain, fast), times, strict=True):
            start = time.perf_counter()
            module(*args, **kwargs)
            found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[0]), statistics.median(times[1])
