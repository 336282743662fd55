"""One benchmark case and where its files lie; imports nothing but the standard library, so that any worker can."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

CACHE = Path(os.environ.get("ZENDNN_CFFI_BENCHMARK_CACHE") or Path(__file__).resolve().parent / ".cache")
DTYPES = ("fp32", "bf16")
QUANTIZED = ("int8", "int8-dynamic")  # scales of activations from calibration inputs, or chosen in each call
CALIBRATION_ROWS = 8  # samples to calibrate with, at least two calls
REFERENCE_ROWS = 16  # outputs are compared with float64 for so many leading samples of a batch: float64 is slow


@dataclass(frozen=True)
class Case:
    """A workload at one batch size, dtype and thread count."""

    workload: str
    batch: int
    dtype: str = "fp32"
    threads: int = 2

    def __str__(self) -> str:
        threads = "" if self.threads == 2 else f" {self.threads} thread" + "s" * (self.threads != 1)
        return f"{self.workload} {self.dtype} b{self.batch}{threads}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        return cls(**json.loads(text))

    @property
    def is_quantized(self) -> bool:
        return self.dtype in QUANTIZED

    @property
    def is_dynamic(self) -> bool:
        return self.dtype == "int8-dynamic"

    @property
    def weights_file(self) -> Path:
        """The state dict that every PyTorch contender loads (torch.save)."""
        return CACHE / self.workload / "weights.pt"

    @property
    def folder(self) -> Path:
        """Inputs, reference outputs and the ONNX file of this workload and batch size."""
        return CACHE / self.workload / f"b{self.batch}"

    @property
    def onnx_file(self) -> Path:
        return self.folder / "model.onnx"

    @property
    def reference_file(self) -> Path:
        """float64 outputs (.npz, arr_0...) of the original model for the first REFERENCE_ROWS samples."""
        return self.folder / "reference.npz"

    @property
    def inputs_file(self) -> Path:
        """The inputs (.npz, arr_0...)."""
        return self.folder / "inputs.npz"

    @property
    def calibration_file(self) -> Path:
        """Inputs to calibrate with (.npz, arr_0...), all calls side by side along the batch; none is in inputs_file."""
        return self.folder / "calibration.npz"

    @property
    def shared_files(self) -> list[Path]:
        """What the contenders of this case read."""
        calibration = [self.calibration_file] if self.is_quantized else []
        return [self.weights_file, self.inputs_file, self.onnx_file, self.reference_file, *calibration]

    def forget(self) -> None:
        """Delete the files of this case's workload; they are made again when needed."""
        shutil.rmtree(CACHE / self.workload, ignore_errors=True)
