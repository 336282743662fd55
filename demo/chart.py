"""The demo's picture: the photograph, both latencies, and the time of every layer by implementation."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

from demo.vision import IMAGENET_MEAN, IMAGENET_STD

EAGER, OURS = "#9aa1a9", "#d1495b"


def draw(records: list[Any], photograph: Tensor, seconds: dict[str, list[float]], path: Path) -> Path:
    """Write the picture as PNG to `path` and return it.

    records     of zendnn_cffi.profile: name, kind, implementation, time_ns
    photograph  [1, 3, H, W] normalised
    seconds     of each call, by way to run the model; "optimized" is ours
    """
    figure = plt.figure(figsize=(12, 7), layout="constrained")
    photo, latency, layers = figure.subplot_mosaic(
        [["photo", "latency", "latency"], ["layers"] * 3], height_ratios=[1, 1.5], width_ratios=[0.6, 1, 1]
    ).values()
    _draw_photo(photo, photograph)
    _draw_latency(latency, seconds)
    _draw_layers(layers, records)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _draw_photo(axes: Any, photograph: Tensor) -> None:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    axes.imshow((photograph[0] * std + mean).clamp(0, 1).permute(1, 2, 0).numpy())
    axes.set_title("the input", loc="left")
    axes.axis("off")


def _draw_latency(axes: Any, seconds: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    colours = [OURS if name == "optimized" else EAGER for name in medians]
    bars = axes.barh(list(medians), list(medians.values()), color=colours, height=0.6)
    axes.bar_label(bars, fmt="%.1f ms", padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title("ResNet-50, batch 1", loc="left", fontweight="bold")
    axes.set_xlabel("milliseconds, median")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_layers(axes: Any, records: list[Any]) -> None:
    """Draw a bar per primitive in the order of execution, coloured by implementation."""
    times_us = np.array([record.time_ns for record in records]) / 1e3
    labels = [f"{record.kind}: {record.implementation}" for record in records]
    spent: dict[str, float] = {}
    for label, time_us in zip(labels, times_us, strict=True):
        spent[label] = spent.get(label, 0.0) + time_us
    colours = [plt.get_cmap("tab20")(rank) for rank in range(20)]
    for rank, label in enumerate(sorted(spent, key=spent.__getitem__, reverse=True)):
        rows = [row for row, other in enumerate(labels) if other == label]
        text = f"{label}  ({spent[label] / 1e3:.2f} ms)"
        axes.bar(rows, times_us[rows], color=colours[rank % len(colours)], label=text, width=0.85)
    axes.set_title(f"time of each of {len(records)} primitives, first to last", loc="left", fontweight="bold")
    axes.set_ylabel("microseconds")
    axes.set_xlim(-1, len(records))
    axes.margins(y=0.3)  # room for the legend
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=2)
