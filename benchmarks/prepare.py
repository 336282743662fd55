"""Write what all contenders of a case share: weights, inputs, float64 reference outputs, an ONNX file, calibration.

    python benchmarks/prepare.py CASE_JSON        (in the `onnx` environment)

What exists already is kept: weights belong to a workload, the rest to a workload and batch size.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

if __name__ == "__main__":
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parent.parent)]

from benchmarks import workloads
from benchmarks.case import CALIBRATION_ROWS, REFERENCE_ROWS, Case


def prepare(case: Case, *, onnx: bool = True) -> None:
    """Write the files of `case` that are missing. onnx=False leaves the ONNX file out."""
    row = workloads.find(case.workload)
    case.folder.mkdir(parents=True, exist_ok=True)
    model = row.build()
    if case.weights_file.exists():
        model.load_state_dict(torch.load(case.weights_file, weights_only=True))
    else:
        _atomically(case.weights_file, lambda path: torch.save(model.state_dict(), path))
    inputs = row.inputs(case.batch)
    if not case.inputs_file.exists():
        _atomically(case.inputs_file, lambda path: np.savez(path, *(tensor.numpy() for tensor in inputs)))
    if case.is_quantized and not case.calibration_file.exists():
        arrays = _calibration(row, case)
        _atomically(case.calibration_file, lambda path: np.savez(path, *arrays))
    if onnx and not case.onnx_file.exists():
        _export(model, inputs, case.onnx_file)
    if not case.reference_file.exists():
        outputs = _reference(model, inputs, case.batch)
        _atomically(case.reference_file, lambda path: np.savez(path, *outputs))


def _calibration(row: workloads.Workload, case: Case) -> list[np.ndarray]:
    """Return inputs of whole calls behind those that are measured with, side by side along the batch."""
    rows = case.batch * max(2, -(-CALIBRATION_ROWS // case.batch))
    inputs = row.inputs(case.batch + rows)
    if any(tensor.ndim == 0 or tensor.shape[0] != case.batch + rows for tensor in inputs):
        raise SystemExit(f"{case}: its inputs do not begin with the batch, so there are none to calibrate with")
    return [tensor[case.batch :].numpy() for tensor in inputs]


def _reference(model: nn.Module, inputs: tuple[torch.Tensor, ...], batch: int) -> list[np.ndarray]:
    """Return the float64 outputs for the leading samples. Inputs without a batch dimension are passed whole."""
    leading = [tensor[:REFERENCE_ROWS] if tensor.ndim and tensor.shape[0] == batch else tensor for tensor in inputs]
    doubled = [tensor.double() if tensor.is_floating_point() else tensor for tensor in leading]
    with torch.inference_mode():
        return [output.numpy() for output in workloads.outputs_of(model.double()(*doubled))]


def _export(model: nn.Module, inputs: tuple[torch.Tensor, ...], path: Path) -> None:
    """Write `model` as ONNX with static shapes, the form in which both ONNX runtimes optimize best."""
    with torch.inference_mode():
        torch.onnx.export(model, inputs, str(path), dynamo=True, optimize=True, verbose=False, external_data=True)


def _atomically(path: Path, write: Any) -> None:
    """Call write(file object) such that `path` appears only when complete."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        write(file)
    os.replace(file.name, path)


if __name__ == "__main__":
    prepare(Case.from_json(sys.argv[1]))
