"""How contenders run a case: what they share, whatever they compute in.

Each loads the case's weights and inputs, and hands out a Runner: a call to time, and a way to read its outputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import Case

Notes = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Runner:
    """How to compute one inference.

    run      () -> outputs in the contender's own form
    outputs  (what run returned) -> list of numpy arrays; called only to check them
    notes    () -> what the contender has to say about what it ran
    module   what was optimized, for contenders of ours
    """

    run: Callable[[], Any]
    outputs: Callable[[Any], list[np.ndarray]]
    notes: Notes = dict
    module: Any = None


Start = Callable[[], Runner]


def torch_case(case: Case, *, channels_last: bool, cast: bool) -> tuple[Any, tuple[Any, ...]]:
    """Return (model with the case's weights, inputs). cast: both in the case's dtype, instead of float32."""
    import torch

    from benchmarks import workloads

    torch.set_num_threads(case.threads)
    torch.set_grad_enabled(False)
    model = workloads.find(case.workload).build(calibrate=False)
    model.load_state_dict(torch.load(case.weights_file, weights_only=True, mmap=True))
    model.eval()
    with np.load(case.inputs_file) as file:
        inputs = tuple(torch.from_numpy(array) for array in file.values())
    if cast and case.dtype == "bf16":
        model = model.to(torch.bfloat16)
        inputs = tuple(tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor for tensor in inputs)
    if channels_last and all(tensor.ndim == 4 for tensor in inputs):
        model = model.to(memory_format=torch.channels_last)
        inputs = tuple(tensor.contiguous(memory_format=torch.channels_last) for tensor in inputs)
    return model, inputs


def torch_runner(call: Callable[..., Any], inputs: tuple[Any, ...], notes: Notes = dict) -> Runner:
    import torch

    from benchmarks import workloads

    def run() -> Any:
        with torch.inference_mode():
            return call(*inputs)

    def outputs(result: Any) -> list[np.ndarray]:
        return [tensor.float().numpy() for tensor in workloads.outputs_of(result)]

    return Runner(run, outputs, notes)


def compiled_runner(compiled: Callable[..., Any], inputs: tuple[Any, ...]) -> Runner:
    """Of what torch.compile returned: freezing needs grad mode off, which torch_case sets.

    inference_mode on top would only make TorchDynamo compile once more.
    """
    return replace(torch_runner(compiled, inputs), run=lambda: compiled(*inputs))


def onnxruntime_start(case: Case, model: Path) -> Start:
    """Run an ONNX file in ONNX Runtime."""
    import onnxruntime

    inputs = numpy_inputs(case)

    def start() -> Runner:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = case.threads
        options.inter_op_num_threads = 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        feed = dict(zip((port.name for port in session.get_inputs()), inputs, strict=True))
        return Runner(lambda: session.run(None, feed), list)

    return start


def openvino_start(case: Case, model: Path, **settings: Any) -> Start:
    """Run an ONNX or OpenVINO file in OpenVINO, one stream with the latency hint.

    settings  properties of the compiled model, besides these
    """
    import openvino

    inputs = numpy_inputs(case)
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": case.threads,
        "NUM_STREAMS": 1,
        # Without this, OpenVINO computes what is float32 in bf16 on a CPU that has it.
        "INFERENCE_PRECISION_HINT": "bf16" if case.dtype == "bf16" else "f32",
    } | settings

    def start() -> Runner:
        core = openvino.Core()
        if folder := os.environ.get("ZENDNN_CFFI_BENCHMARK_OPENVINO_CACHE"):  # cold_start.py
            core.set_property({"CACHE_DIR": folder})
        compiled = core.compile_model(core.read_model(str(model)), "CPU", settings)
        request = compiled.create_infer_request()
        for index, array in enumerate(inputs):
            request.set_input_tensor(index, openvino.Tensor(array))

        def outputs(_: Any) -> list[np.ndarray]:
            return [np.array(request.get_output_tensor(index).data) for index in range(len(compiled.outputs))]

        return Runner(request.infer, outputs)

    return start


def numpy_inputs(case: Case) -> list[np.ndarray]:
    with np.load(case.inputs_file) as file:
        return [np.ascontiguousarray(array) for array in file.values()]
