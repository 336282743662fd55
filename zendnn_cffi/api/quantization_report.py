"""What quantize() returns, and what it says of that: how near each layer is to the float model, and what it became."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

INT8 = "int8"
_FULL_DB = 100.0  # as much is drawn


def sqnr_db(expected: Any, actual: Any) -> float:
    """Return signal to quantization noise of two results, dB: 10 log10(sum x^2 / sum (x - y)^2); inf where equal."""
    signal, noise = powers(expected, actual)
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal and noise < math.inf else -math.inf


def powers(expected: Any, actual: Any) -> tuple[float, float]:
    """Return sum x^2 and sum (x - y)^2 over the floating point tensors of two results.

    Infinities and NaN that both have are left out. Where one alone has some, there is infinite noise.
    """
    signal = noise = 0.0
    for x, y in zip(pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=True):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x, y = x.detach().double(), y.detach().double()
            both = (x == y) | (x.isnan() & y.isnan())
            signal += float(x.where(x.isfinite(), 0.0).square().sum())
            noise += float((x - y).where(~both, 0.0).square().nan_to_num(nan=math.inf, posinf=math.inf).sum())
    return signal, noise


def noise_db(noise: float) -> float:
    """Return the signal to noise ratio, dB, of noise over signal; inf where there is none."""
    return -10 * math.log10(noise) if noise else math.inf


@dataclass(frozen=True)
class LayerReport:
    """One convolution or linear layer.

    name, module  the node in the converted graph; the submodule it comes from
    kind          the operator, such as "conv2d"
    sqnr_db       of its result against the float model's, where all layers before it are quantized, too
    computes_in   "int8", "float32", "bfloat16", "float", or "plain PyTorch" outside of regions
    alone_db      of the model's outputs, where this layer alone is quantized; None without limits
    gain_ms       time that integers save this layer and what runs behind it, by the profiles of both models; negative
                  where they take longer, None where nothing was timed
    why           what decided between integers and float
    place         the submodule, its weight where that has several layers, and which call where it is called again
    """

    name: str
    module: str
    kind: str
    sqnr_db: float
    computes_in: str
    alone_db: float | None = None
    gain_ms: float | None = None
    why: str = ""
    place: str = ""


def _place(row: LayerReport) -> str:
    return row.place or row.module or row.name


class FrontierPoint(NamedTuple):
    """A choice of layers that no other beats in both time and error.

    time_ms  between the times of the float model and of all layers quantized, by the gains of the layers: a prediction
    sqnr_db  of the outputs, measured with just these layers quantized
    layers   how many they are
    """

    time_ms: float
    sqnr_db: float
    layers: int


@dataclass(frozen=True)
class QuantizationReport:
    """The model as a whole; print it, or draw it.

    sqnr_db   of the outputs for the first calibration input
    float_ms  median time of the optimized float model for that input, None where not measured
    int8_ms   of the quantized one, in the same run
    chosen    how many layers are quantized, None where all are that can be, unasked
    frontier  choices of layers from all to none, each the fastest for its error; empty without limits, as are
    budget_db, verified_db  the limit, and the optimized module's SQNR over the calibration inputs
    accuracies  of the float model and of the optimized module
    bits      of weights: 7 where the CPU has no VNNI, as kernels are exact of those alone
    submodules  those that are quantized, where torch.export cannot follow the model as a whole: sqnr_db and verified_db
                are of the results of that of them which is furthest from the float one
    """

    model: str
    layers: tuple[LayerReport, ...]
    sqnr_db: float
    float_ms: float | None = None
    int8_ms: float | None = None
    frontier: tuple[FrontierPoint, ...] = ()
    chosen: int | None = None
    budget_db: float | None = None
    verified_db: float | None = None
    accuracies: tuple[float, float] | None = None
    bits: int = 8
    submodules: tuple[str, ...] = ()

    def __str__(self) -> str:
        width = max([len(_place(row)) for row in self.layers], default=5)
        searched = any(row.alone_db is not None for row in self.layers)
        lines = [f"{'layer':{width}}  {'operator':16}  {'SQNR dB':>7}  {'alone dB  gain ms  ' * searched}computes in"]
        for row in self.layers:
            line = f"{_place(row):{width}}  {row.kind:16}  {row.sqnr_db:7.1f}  "
            if searched:
                line += " " * 19 if row.alone_db is None else f"{row.alone_db:8.1f}  {row.gain_ms:7.3f}  "
            lines.append(line + row.computes_in + f" ({row.why})" * bool(row.why))
        count = sum(row.computes_in == INT8 for row in self.layers)
        lines.append(f"{self.model}: {count} of {len(self.layers)} layers in int8, outputs {self.sqnr_db:.1f} dB")
        if self.float_ms is not None and self.int8_ms is not None:
            faster = self.float_ms / self.int8_ms
            lines[-1] += (
                f", {self.float_ms:.2f} ms in float, {self.int8_ms:.2f} ms in int8: {faster:.2f} times the speed"
            )
        return "\n".join([*lines, *self._limits()])

    def _limits(self) -> list[str]:
        lines = [] if self.bits == 8 else [f"weights of {self.bits} bits, as this CPU has no VNNI"]
        if self.submodules:
            lines.append(f"quantized one by one: {', '.join(self.submodules)}; torch.export does not follow the whole")
        if self.verified_db is not None:
            asked = "" if self.budget_db is None else f", {self.budget_db:.1f} asked for"
            lines.append(f"over the calibration inputs: {self.verified_db:.1f} dB{asked}")
        if self.accuracies is not None:
            lines.append(f"accuracy {self.accuracies[0]:.4g} in float, {self.accuracies[1]:.4g} quantized")
        if self.chosen == 0:
            could_be = any(row.gain_ms is not None for row in self.layers)
            why = "it would not be faster" if could_be else "the model has none that can be"
            if any(row.alone_db is not None for row in self.layers):
                why = "nothing else keeps to the limits"
            lines.append(f"no layer is quantized: {why}")
        return lines

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw the layers' SQNR, and the frontier where there is one. Raises ImportError without matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("drawing needs matplotlib: pip install matplotlib, or zendnn_cffi[plot]") from error
        panels = 2 if self.frontier else 1
        figure = Figure(figsize=(8 * panels, max(2.5, 0.22 * len(self.layers) + 1)), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False)[0]
        self._draw_layers(axes[0])
        if self.frontier:
            self._draw_frontier(axes[1])
        figure.savefig(path, dpi=120)
        return Path(path)

    def _draw_layers(self, axes: Any) -> None:
        names = [_place(row) for row in self.layers]
        colours = ["#2e86ab" if row.computes_in == INT8 else "#9aa1a9" for row in self.layers]
        axes.barh(range(len(names)), [min(row.sqnr_db, _FULL_DB) for row in self.layers], color=colours)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("SQNR against the float model, dB (blue: computes in int8)")
        axes.set_title(f"{self.model}: outputs {self.sqnr_db:.1f} dB")

    def _draw_frontier(self, axes: Any) -> None:
        points = [point for point in self.frontier if point.sqnr_db < _FULL_DB]
        axes.plot(
            [p.sqnr_db for p in points], [p.time_ms for p in points], "o-", color="#9aa1a9", label="predicted time"
        )
        for point in points:
            axes.annotate(f" {point.layers}", (point.sqnr_db, point.time_ms), fontsize=8)
        if self.verified_db is not None and self.int8_ms is not None and self.verified_db < _FULL_DB:
            axes.plot(
                [self.verified_db],
                [self.int8_ms],
                "o",
                color="#2e86ab",
                label=f"result: {self.chosen} layers, measured",
            )
        if self.budget_db is not None:
            axes.axvline(self.budget_db, color="#d1495b", linestyle="--", label="budget")
        axes.set_xlabel("SQNR of the outputs, dB (numbers: layers in int8)")
        axes.set_ylabel("time, ms")
        axes.set_ylim(bottom=0)
        axes.legend()


class Quantization(NamedTuple):
    """What quantize() returns.

    module     the optimized module; save() writes it, pickle takes no exported graphs
    report     a row for each layer, and the whole
    converted  the graph with quantize and dequantize operators, an fx.GraphModule, which torch.export.export takes and
               torch.export.save saves; where submodules were quantized one by one, the model with theirs in it
    """

    module: fx.GraphModule
    report: QuantizationReport
    converted: Any
