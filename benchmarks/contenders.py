"""The table of contenders: each way to run a case, in the environment it needs.

A contender's `prepare` runs in a worker process of its own: it loads what the case provides and returns `start`.
Calling that makes the thing ready (optimizes, compiles, creates the session), which is timed together with the first
inference, and returns a Runner. All get the same weights and inputs, in the form each is fastest with: channels_last
for PyTorch's compilers, static shapes for the ONNX runtimes, the plain contiguous images a user has for ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import Case

SAVED_VARIABLE = "ZENDNN_CFFI_BENCHMARK_SAVED"  # the folder where saved modules are
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


@dataclass(frozen=True)
class Contender:
    """One row of the table: `environment` as in peers.py, `is_peer` False for ours and its variants."""

    name: str
    title: str
    environment: str
    prepare: Callable[[Case], Start]
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    is_peer: bool = True


def _torch_case(case: Case, *, channels_last: bool, cast: bool) -> tuple[Any, tuple[Any, ...]]:
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


def _torch_runner(call: Callable[..., Any], inputs: tuple[Any, ...], notes: Notes = dict) -> Runner:
    import torch

    from benchmarks import workloads

    def run() -> Any:
        with torch.inference_mode():
            return call(*inputs)

    def outputs(result: Any) -> list[np.ndarray]:
        return [tensor.float().numpy() for tensor in workloads.outputs_of(result)]

    return Runner(run, outputs, notes)


def _eager(case: Case, *, channels_last: bool = False) -> Start:
    model, inputs = _torch_case(case, channels_last=channels_last, cast=True)
    return lambda: _torch_runner(model, inputs)


def _eager_channels_last(case: Case) -> Start:
    return _eager(case, channels_last=True)


def _compiled(case: Case, backend: str) -> Start:
    import torch
    import torch._inductor.config

    model, inputs = _torch_case(case, channels_last=True, cast=True)
    torch._inductor.config.freezing = True

    def start() -> Runner:
        compiled = torch.compile(model, backend=backend)
        # Freezing needs grad mode off; inference_mode on top would only make Dynamo compile once more.
        return Runner(lambda: compiled(*inputs), _torch_runner(compiled, inputs).outputs)

    return start


def _inductor(case: Case) -> Start:
    return _compiled(case, "inductor")


def _zentorch(case: Case) -> Start:
    import zentorch  # noqa: F401  (registers the backend)

    return _compiled(case, "zentorch")


def _ours(case: Case) -> Start:
    import torch

    import zendnn_cffi

    model, inputs = _torch_case(case, channels_last=False, cast=False)

    def start() -> Runner:
        dtype = torch.bfloat16 if case.dtype == "bf16" else None
        optimized = zendnn_cffi.optimize(model, inputs, dtype=dtype)
        runner = _torch_runner(optimized, inputs, lambda: {"explain": str(zendnn_cffi.explain(optimized))})
        return replace(runner, module=optimized)

    return start


def _ours_loaded(case: Case) -> Start:
    """What zendnn_cffi.save wrote; the file is made by another process, where there is none."""
    folder = Path(os.environ.get(SAVED_VARIABLE) or tempfile.gettempdir())
    path = folder / f"{case.workload}-{case.batch}-{case.dtype}-{case.threads}.safetensors"
    if not path.exists():
        code = "import sys; from benchmarks.contenders import save_case; save_case(*sys.argv[1:])"
        root = str(Path(__file__).resolve().parent.parent)
        found = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
        command = [sys.executable, "-c", code, case.to_json(), str(path)]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": found})
    import torch

    import zendnn_cffi

    torch.set_num_threads(case.threads)
    torch.set_grad_enabled(False)
    inputs = tuple(map(torch.from_numpy, _numpy_inputs(case)))  # the model's own code is not needed

    def start() -> Runner:
        loaded = zendnn_cffi.load(path)
        return _torch_runner(loaded, inputs, lambda: {"explain": str(zendnn_cffi.explain(loaded))})

    return start


def save_case(text: str, path: str) -> None:
    """Write the optimized model of a case to a file."""
    import zendnn_cffi

    runner = _ours(Case.from_json(text))()
    runner.run()
    zendnn_cffi.save(runner.module, path)


def _ours_compiled(case: Case) -> Start:
    import torch

    from zendnn_cffi import backend

    backend.register()
    model, inputs = _torch_case(case, channels_last=False, cast=False)

    def start() -> Runner:
        dtype = torch.bfloat16 if case.dtype == "bf16" else None
        compiled = torch.compile(model, backend="zendnn", options={"dtype": dtype})
        return Runner(lambda: compiled(*inputs), _torch_runner(compiled, inputs).outputs)

    return start


def _ours_on_onednn(case: Case) -> Start:
    from benchmarks import onednn

    onednn.use()
    return _ours(case)


def _onnxruntime(case: Case) -> Start:
    import onnxruntime

    inputs = _numpy_inputs(case)

    def start() -> Runner:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = case.threads
        options.inter_op_num_threads = 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        session = onnxruntime.InferenceSession(str(case.onnx_file), options, providers=["CPUExecutionProvider"])
        feed = dict(zip((port.name for port in session.get_inputs()), inputs, strict=True))
        return Runner(lambda: session.run(None, feed), list)

    return start


def _openvino(case: Case) -> Start:
    import openvino

    inputs = _numpy_inputs(case)
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": case.threads,
        "NUM_STREAMS": 1,
        # Without this, OpenVINO computes float32 models in bf16 on a CPU that has it.
        "INFERENCE_PRECISION_HINT": {"fp32": "f32", "bf16": "bf16"}[case.dtype],
    }

    def start() -> Runner:
        core = openvino.Core()
        if folder := os.environ.get("ZENDNN_CFFI_BENCHMARK_OPENVINO_CACHE"):  # cold_start.py
            core.set_property({"CACHE_DIR": folder})
        compiled = core.compile_model(core.read_model(str(case.onnx_file)), "CPU", settings)
        request = compiled.create_infer_request()
        for index, array in enumerate(inputs):
            request.set_input_tensor(index, openvino.Tensor(array))

        def outputs(_: Any) -> list[np.ndarray]:
            return [np.array(request.get_output_tensor(index).data) for index in range(len(compiled.outputs))]

        return Runner(request.infer, outputs)

    return start


def _numpy_inputs(case: Case) -> list[np.ndarray]:
    with np.load(case.inputs_file) as file:
        return [np.ascontiguousarray(array) for array in file.values()]


CONTENDERS: dict[str, Contender] = {
    row.name: row
    for row in (
        Contender("ours", "zendnn_cffi", "ours", _ours, is_peer=False),
        Contender("ours_loaded", "zendnn_cffi, loaded", "ours", _ours_loaded, is_peer=False),
        Contender("ours_compile", "zendnn_cffi by torch.compile", "ours", _ours_compiled, is_peer=False),
        Contender("onednn", "zendnn_cffi on oneDNN 2.6", "ours", _ours_on_onednn, is_peer=False),
        Contender("eager", "PyTorch eager", "ours", _eager),
        Contender("eager_cl", "PyTorch eager, channels_last", "ours", _eager_channels_last),
        Contender("inductor", "Inductor + freezing", "ours", _inductor),
        Contender("zentorch", "zentorch", "zentorch", _zentorch),
        # ONNX Runtime's CPU provider has no bf16 convolution or matmul.
        Contender("onnxruntime", "ONNX Runtime", "onnx", _onnxruntime, dtypes=("fp32",)),
        Contender("openvino", "OpenVINO", "onnx", _openvino),
    )
}
