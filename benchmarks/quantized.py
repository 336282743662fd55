"""Contenders in 8-bit integers: each quantizes the case's float model by its own field's tools, on the same inputs.

`int8` is static: scales of activations come from the case's calibration inputs, of which none is measured with.
`int8-dynamic` chooses them in each call, for linear layers alone. What stays in floating point is float32 on all sides.
Quantizing is part of preparing a case and is not timed; files that it makes lie beside the case's ONNX file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.case import Case
from benchmarks.runners import (
    Runner,
    Start,
    compiled_runner,
    onnxruntime_start,
    openvino_start,
    torch_case,
    torch_runner,
)


def calibration_calls(case: Case) -> list[tuple[np.ndarray, ...]]:
    """Return the arguments of each call to calibrate with."""
    with np.load(case.calibration_file) as file:
        arrays = list(file.values())
    calls = arrays[0].shape[0] // case.batch
    return [tuple(array[i * case.batch : (i + 1) * case.batch] for array in arrays) for i in range(calls)]


def ours(case: Case, *, attention: bool = True) -> Start:
    """zendnn_cffi.quantize()."""
    import torch

    import zendnn_cffi

    model, inputs = torch_case(case, channels_last=False, cast=False)
    calls = [tuple(map(torch.from_numpy, call)) for call in calibration_calls(case)]
    fast, report, _ = zendnn_cffi.quantize(model, calls, dynamic=case.is_dynamic, attention=attention)

    def start() -> Runner:
        def notes() -> dict[str, Any]:
            return {"explain": str(zendnn_cffi.explain(fast)), "report": str(report)}

        return replace(torch_runner(fast, inputs, notes), module=fast)

    return start


def ours_float_attention(case: Case) -> Start:
    """The same, queries and keys of attention in float."""
    return ours(case, attention=False)


def inductor(case: Case) -> Start:
    """Torchao's PT2E with X86InductorQuantizer, compiled by Inductor with freezing."""
    import torch
    import torch._inductor.config
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    model, inputs = torch_case(case, channels_last=True, cast=False)
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=case.is_dynamic))
    prepared = prepare_pt2e(torch.export.export(model, inputs, strict=True).module(), quantizer)
    for call in calibration_calls(case):
        prepared(*map(torch.from_numpy, call))
    converted = convert_pt2e(prepared)
    torch._inductor.config.freezing = True

    def start() -> Runner:
        return compiled_runner(torch.compile(converted), inputs)

    return start


def onnxruntime(case: Case) -> Start:
    """ONNX Runtime's own quantization: QDQ with a scale for each output channel, or its dynamic form."""
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    quantized = case.folder / f"onnxruntime-{case.dtype}.onnx"
    if not quantized.exists():
        whole, ready = (case.folder / f"onnxruntime-{name}.onnx" for name in ("whole", "ready"))
        onnx.save(onnx.load(str(case.onnx_file)), str(whole))  # weights in a file of their own are refused below
        quant_pre_process(str(whole), str(ready), skip_symbolic_shape=True)
        part = quantized.with_suffix(".part")
        if case.is_dynamic:
            quantization.quantize_dynamic(str(ready), str(part), per_channel=True)
        else:
            names = [port.name for port in onnx.load(str(ready)).graph.input]
            reader = _Reader(names, calibration_calls(case))
            quantization.quantize_static(
                str(ready),
                str(part),
                reader,
                quant_format=quantization.QuantFormat.QDQ,
                per_channel=True,
                activation_type=quantization.QuantType.QUInt8,
            )
        part.rename(quantized)
    return onnxruntime_start(case, quantized)


def openvino(case: Case) -> Start:
    """NNCF's post-training quantization in OpenVINO; dynamic: 8-bit weights, and activations by groups in the call."""
    import nncf
    import openvino as ov

    quantized = case.folder / f"openvino-{case.dtype}.xml"
    if not quantized.exists():
        model = ov.Core().read_model(str(case.onnx_file))
        if case.is_dynamic:
            model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
        else:
            operations = {node.get_type_name() for node in model.get_ops()}
            has_attention = bool(operations & {"Softmax", "ScaledDotProductAttention"})
            calls = calibration_calls(case)
            model = nncf.quantize(
                model,
                nncf.Dataset([dict(enumerate(call)) for call in calls]),
                subset_size=len(calls),
                preset=nncf.QuantizationPreset.MIXED if has_attention else nncf.QuantizationPreset.PERFORMANCE,
                model_type=nncf.ModelType.TRANSFORMER if has_attention else None,
            )
        ov.save_model(model, str(quantized), compress_to_fp16=False)
    groups = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 64} if case.is_dynamic else {}
    return openvino_start(case, quantized, **groups)


class _Reader:
    """Calibration calls in the form that ONNX Runtime reads: a mapping by name, None behind the last."""

    def __init__(self, names: Sequence[str], calls: Sequence[tuple[np.ndarray, ...]]) -> None:
        self._feeds: Iterator[dict[str, np.ndarray]] = (dict(zip(names, call, strict=True)) for call in calls)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)
