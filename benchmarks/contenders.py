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

from benchmarks import quantized
from benchmarks.case import DTYPES, QUANTIZED, Case
from benchmarks.runners import (
    Runner,
    Start,
    compiled_runner,
    numpy_inputs,
    onnxruntime_start,
    openvino_start,
    torch_case,
    torch_runner,
)

SAVED_VARIABLE = "ZENDNN_CFFI_BENCHMARK_SAVED"  # the folder where saved modules are


@dataclass(frozen=True)
class Contender:
    """One row of the table.

    environment  as in peers.py
    prepare      for cases in floating point
    quantized    for cases in 8-bit integers
    dtypes       of those, the cases that it can run
    is_peer      False for ours and its variants
    """

    name: str
    title: str
    environment: str
    prepare: Callable[[Case], Start] | None = None
    quantized: Callable[[Case], Start] | None = None
    dtypes: tuple[str, ...] = (*DTYPES, *QUANTIZED)
    is_peer: bool = True

    def way(self, case: Case) -> Callable[[Case], Start] | None:
        """Return what prepares the case; None where this contender has no such dtype."""
        if case.dtype not in self.dtypes:
            return None
        return self.quantized if case.is_quantized else self.prepare

    def start_of(self, case: Case) -> Start:
        """Prepare the case: load its files, quantize. ValueError where `way` is None."""
        way = self.way(case)
        if way is None:
            raise ValueError(f"no {case.dtype}")
        return way(case)


def _eager(case: Case, *, channels_last: bool = False) -> Start:
    model, inputs = torch_case(case, channels_last=channels_last, cast=True)
    return lambda: torch_runner(model, inputs)


def _eager_channels_last(case: Case) -> Start:
    return _eager(case, channels_last=True)


def _compiled(case: Case, backend: str) -> Start:
    import torch
    import torch._inductor.config

    model, inputs = torch_case(case, channels_last=True, cast=True)
    torch._inductor.config.freezing = True

    def start() -> Runner:
        return compiled_runner(torch.compile(model, backend=backend), inputs)

    return start


def _inductor(case: Case) -> Start:
    return _compiled(case, "inductor")


def _zentorch(case: Case) -> Start:
    import zentorch  # noqa: F401  (registers the backend)

    return _compiled(case, "zentorch")


def _ours(case: Case) -> Start:
    import torch

    import zendnn_cffi

    model, inputs = torch_case(case, channels_last=False, cast=False)

    def start() -> Runner:
        dtype = torch.bfloat16 if case.dtype == "bf16" else None
        optimized = zendnn_cffi.optimize(model, inputs, dtype=dtype)
        runner = torch_runner(optimized, inputs, lambda: {"explain": str(zendnn_cffi.explain(optimized))})
        return replace(runner, module=optimized)

    return start


def _ours_in(dtype: str) -> Callable[[Case], Start]:
    """What the network takes in a floating-point dtype, beside integers."""
    return lambda case: _ours(replace(case, dtype=dtype))


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
    inputs = tuple(map(torch.from_numpy, numpy_inputs(case)))  # the model's own code is not needed

    def start() -> Runner:
        loaded = zendnn_cffi.load(path)
        return torch_runner(loaded, inputs, lambda: {"explain": str(zendnn_cffi.explain(loaded))})

    return start


def save_case(text: str, path: str) -> None:
    """Write the optimized model of a case to a file."""
    import zendnn_cffi

    runner = CONTENDERS["ours"].start_of(Case.from_json(text))()
    runner.run()
    zendnn_cffi.save(runner.module, path)


def _ours_compiled(case: Case) -> Start:
    import torch

    from zendnn_cffi import backend

    backend.register()
    model, inputs = torch_case(case, channels_last=False, cast=False)

    def start() -> Runner:
        dtype = torch.bfloat16 if case.dtype == "bf16" else None
        return compiled_runner(torch.compile(model, backend="zendnn", options={"dtype": dtype}), inputs)

    return start


def _ours_on_onednn(case: Case) -> Start:
    from benchmarks import onednn

    onednn.use()
    return _ours(case)


def _onnxruntime(case: Case) -> Start:
    return onnxruntime_start(case, case.onnx_file)


def _openvino(case: Case) -> Start:
    return openvino_start(case, case.onnx_file)


CONTENDERS: dict[str, Contender] = {
    row.name: row
    for row in (
        Contender("ours", "zendnn_cffi", "ours", _ours, quantized.ours, is_peer=False),
        Contender(
            "ours_float_attention",
            "zendnn_cffi, attention=False",
            "ours",
            quantized=quantized.ours_float_attention,
            dtypes=("int8",),
            is_peer=False,
        ),
        Contender("ours_loaded", "zendnn_cffi, loaded", "ours", _ours_loaded, _ours_loaded, is_peer=False),
        Contender("ours_compile", "zendnn_cffi by torch.compile", "ours", _ours_compiled, is_peer=False),
        Contender("ours_bf16", "zendnn_cffi in bf16", "ours", None, _ours_in("bf16"), is_peer=False),
        Contender("ours_fp32", "zendnn_cffi in float32", "ours", None, _ours_in("fp32"), is_peer=False),
        Contender("onednn", "zendnn_cffi on oneDNN 2.6", "ours", _ours_on_onednn, is_peer=False),
        Contender("eager", "PyTorch eager", "ours", _eager),
        Contender("eager_cl", "PyTorch eager, channels_last", "ours", _eager_channels_last),
        Contender("inductor", "Inductor + freezing", "ours", _inductor, quantized.inductor),
        Contender("zentorch", "zentorch", "zentorch", _zentorch),
        # ONNX Runtime's CPU provider has no bf16 convolution or matmul.
        Contender(
            "onnxruntime", "ONNX Runtime", "onnx", _onnxruntime, quantized.onnxruntime, dtypes=("fp32", *QUANTIZED)
        ),
        Contender("openvino", "OpenVINO", "onnx", _openvino, quantized.openvino),
    )
}
