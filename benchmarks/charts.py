"""Bar charts of latency relative to the fastest peer, and throughput against batch size, as PNG files."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402  (the backend must be chosen first)
import numpy as np  # noqa: E402

from benchmarks.contenders import CONTENDERS  # noqa: E402
from benchmarks.report import COLOURS, OURS, Result  # noqa: E402


def draw(results: list[Result], folder: Path) -> list[Path]:
    """Write the charts that the results allow into `folder`; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    groups: dict[tuple[str, int, int], list[Result]] = defaultdict(list)
    batches: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        case = result.case
        groups[case.dtype, case.batch, case.threads].append(result)
        batches[case.workload, case.dtype].append(result)
    for (dtype, batch, threads), rows in groups.items():
        file = folder / f"speed-{dtype}-b{batch}-t{threads}.png"
        files.append(_bars(rows, file, f"{dtype}, batch {batch}, {threads} thread" + "s" * (threads != 1)))
    for (workload, dtype), rows in batches.items():
        if len({row.case.batch for row in rows}) > 2:
            files.append(_scaling(rows, folder / f"scaling-{workload}-{dtype}.png", f"{workload}, {dtype}"))
    return files


def _bars(results: list[Result], path: Path, title: str) -> Path:
    """Draw, for every model, each contender's speed relative to the fastest peer (1.0: as fast; higher is better)."""
    names = [name for name in CONTENDERS if any(name in row.summaries() for row in results)]
    figure, axes = plt.subplots(figsize=(max(6.0, 1.5 * len(results) + 2.5), 4.5), layout="constrained")
    width = 0.84 / max(len(names), 1)
    for column, name in enumerate(names):
        heights, places = [], []
        for row, result in enumerate(results):
            mine, peer = result.summaries().get(name), result.fastest_peer()
            if mine and peer:
                places.append(row + (column - (len(names) - 1) / 2) * width)
                heights.append(peer.median_ms / mine.median_ms)
        bars = axes.bar(places, heights, width * 0.94, label=CONTENDERS[name].title, color=COLOURS.get(name))
        if name == OURS:
            axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(results)), [result.case.workload for result in results], rotation=20, ha="right")
    axes.set_ylabel("speed relative to the fastest peer")
    axes.set_title(title, loc="left", fontweight="bold")
    _finish(axes, figure, path)
    return path


def _scaling(results: list[Result], path: Path, title: str) -> Path:
    """Draw throughput against batch size, a line per contender and thread count."""
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    threads = sorted({result.case.threads for result in results})
    for name in CONTENDERS:
        for count in threads:
            points = sorted(
                (row.case.batch, row.case.batch / row.summaries()[name].median_ms * 1e3)
                for row in results
                if row.case.threads == count and name in row.summaries()
            )
            if points:
                suffix = f", {count} thread" + "s" * (count != 1) if len(threads) > 1 else ""
                label = CONTENDERS[name].title + suffix
                style: Any = "-" if count == threads[-1] else "--"
                axes.plot(*np.array(points).T, style, marker="o", markersize=3, color=COLOURS.get(name), label=label)
    sizes = sorted({result.case.batch for result in results})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch size")
    axes.set_ylabel("samples per second")
    axes.set_title(title, loc="left", fontweight="bold")
    _finish(axes, figure, path)
    return path


def _finish(axes: Any, figure: Any, path: Path) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=130)
    plt.close(figure)
