"""What quantize() says of its result: how near each layer is to the float model, and what became of it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

INT8 = "int8"


def sqnr_db(expected: Any, actual: Any) -> float:
    """Return signal to quantization noise of two results, dB: 10 log10(sum x^2 / sum (x - y)^2); inf where equal."""
    signal = noise = 0.0
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=True)
    for x, y in pairs:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x, y = x.detach().double(), y.detach().double()
            signal += float(x.square().sum())
            noise += float((x - y).square().sum())
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


@dataclass(frozen=True)
class LayerReport:
    """One convolution or linear layer.

    name, module  the node in the converted graph; the submodule it comes from
    kind          the operator, such as "conv2d"
    sqnr_db       of its result against the float model's, where all layers before it are quantized, too
    computes_in   "int8", "float32", "bfloat16", or "plain PyTorch" outside of regions
    """

    name: str
    module: str
    kind: str
    sqnr_db: float
    computes_in: str


@dataclass(frozen=True)
class QuantizationReport:
    """The model as a whole; print it, or draw it.

    sqnr_db   of the outputs for the first calibration input
    float_ms  median time of the optimized float model for that input, None where not measured
    int8_ms   of the quantized one, in the same run
    """

    model: str
    layers: tuple[LayerReport, ...]
    sqnr_db: float
    float_ms: float | None = None
    int8_ms: float | None = None

    def __str__(self) -> str:
        width = max([len(row.module or row.name) for row in self.layers], default=5)
        lines = [f"{'layer':{width}}  {'operator':16}  {'SQNR dB':>7}  computes in"]
        for row in self.layers:
            lines.append(f"{row.module or row.name:{width}}  {row.kind:16}  {row.sqnr_db:7.1f}  {row.computes_in}")
        count = sum(row.computes_in == INT8 for row in self.layers)
        lines.append(f"{self.model}: {count} of {len(self.layers)} layers in int8, outputs {self.sqnr_db:.1f} dB")
        if self.float_ms is not None and self.int8_ms is not None:
            faster = self.float_ms / self.int8_ms
            lines[-1] += (
                f", {self.float_ms:.2f} ms in float, {self.int8_ms:.2f} ms in int8: {faster:.2f} times the speed"
            )
        return "\n".join(lines)

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Write the layers' SQNR as a picture. Raises ImportError without matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("drawing needs matplotlib: pip install matplotlib, or zendnn_cffi[plot]") from error
        figure = Figure(figsize=(8, max(2.5, 0.22 * len(self.layers) + 1)), layout="constrained")
        axes = figure.subplots()
        names = [row.module or row.name for row in self.layers]
        colours = ["#2e86ab" if row.computes_in == INT8 else "#9aa1a9" for row in self.layers]
        axes.barh(range(len(names)), [min(row.sqnr_db, 100.0) for row in self.layers], color=colours)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("SQNR against the float model, dB (blue: computes in int8)")
        axes.set_title(f"{self.model}: outputs {self.sqnr_db:.1f} dB")
        figure.savefig(path, dpi=120)
        return Path(path)
