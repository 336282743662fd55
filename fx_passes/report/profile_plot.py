"""Drawing a Profile: a bar per call in order of execution, and the calls under this machine's roofline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from fx_passes.report.records import PrimitiveTime

_MOST_NAMES = 40  # of calls below their bars
_COLOURS = 10


def draw(records: Sequence[PrimitiveTime], total_ns: int, about: str = "", target: Any = None) -> Any:
    """Draw calls, of a run of total_ns, on a pair of axes, or on a new figure; return the figure.

    about    a line above them: what was measured, and where
    target   a pair of axes, a path that the figure is written to, or None
    Raises   ImportError without matplotlib, TypeError for another target.
    """
    try:
        from matplotlib.axes import Axes
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install matplotlib, or zendnn_cffi[plot]") from error
    path = None
    if target is None or isinstance(target, str | os.PathLike):
        path = target
        figure = Figure(figsize=(13, 4.5), layout="constrained")
        bars, roofline = figure.subplots(1, 2, width_ratios=(3, 2))
    else:
        pair = list(target) if hasattr(target, "__iter__") else [target]
        if len(pair) != 2 or not all(isinstance(axes, Axes) for axes in pair):
            raise TypeError(f"target must be a path, a pair of matplotlib axes or None, got {target!r}")
        bars, roofline = pair
        figure = bars.figure
    colours = _colours(records)
    _draw_bars(bars, records, total_ns, colours)
    if about:
        bars.set_title(f"{about}\n{bars.get_title()}", loc="left", fontsize=9)
        bars.set_title("")
    _draw_roofline(roofline, records, colours)
    if path is not None:
        figure.savefig(path)
    return figure


def _what(record: PrimitiveTime) -> str:
    return f"{record.kind} {record.implementation}" if record.kind != record.implementation else record.kind


def _colours(records: Sequence[PrimitiveTime]) -> dict[str, str]:
    """A colour for each primitive and implementation, those with most time first; the last is shared."""
    times: dict[str, int] = {}
    for record in records:
        times[_what(record)] = times.get(_what(record), 0) + record.time_ns
    ranked = sorted(times, key=times.__getitem__, reverse=True)
    return {what: f"C{min(rank, _COLOURS - 1)}" for rank, what in enumerate(ranked)}


def _draw_bars(axes: Any, records: Sequence[PrimitiveTime], total_ns: int, colours: dict[str, str]) -> None:
    labelled: set[str] = set()
    for position, record in enumerate(records):
        colour = colours[_what(record)]
        label = _what(record) if colour not in labelled else None
        labelled.add(colour)
        axes.bar(position, record.time_ns / 1e3, color=colour, label=label)
    if len(records) <= _MOST_NAMES:
        axes.set_xticks(range(len(records)), [record.name for record in records], rotation=90, fontsize=7)
    axes.set_xlabel("calls, in order of execution")
    axes.set_ylabel("microseconds")
    axes.set_title(f"{sum(record.time_ns for record in records) / 1e6:.2f} of {total_ns / 1e6:.2f} ms inside calls")
    _tidy(axes)
    if labelled:
        axes.legend(frameon=False, fontsize=7, loc="upper left", ncols=2)
        axes.set_ylim(top=(1.05 + 0.03 * len(labelled)) * axes.get_ylim()[1])  # room for the legend


def _draw_roofline(axes: Any, records: Sequence[PrimitiveTime], colours: dict[str, str]) -> None:
    """GFLOP/s over operations per byte; what counts no operations (reorders, pooling) has no place here."""
    counted = [record for record in records if record.flops and record.bytes_moved]
    for record in counted:
        size = 15 + 600 * record.time_ns / max(sum(record.time_ns for record in records), 1)
        axes.scatter(record.intensity, record.gflops, s=size, color=colours[_what(record)], alpha=0.7, linewidths=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("floating point operations per byte of operands and result")
    axes.set_ylabel("GFLOP/s")
    peaks = {record.dtype: record.peak_gflops for record in counted if record.peak_gflops}
    if counted and peaks:
        bandwidth = counted[0].peak_gbytes_per_s
        least, most = (f(record.intensity for record in counted) for f in (min, max))
        for dtype, peak in peaks.items():
            ridge = peak / bandwidth
            ends = [min(least, ridge) / 2, ridge, max(most, ridge) * 2]
            axes.plot(ends, [ends[0] * bandwidth, peak, peak], color="0.3", linewidth=1)
            axes.annotate(f"{peak:.0f} GFLOP/s {dtype}", (ends[2], peak), ha="right", va="bottom", fontsize=8)
        axes.set_title(f"roofline; memory {bandwidth:.0f} GB/s")
        notes = "\n".join(_above_the_roof(counted))
        axes.text(0.99, 0.02, notes, transform=axes.transAxes, ha="right", va="bottom", fontsize=7, color="0.3")
    _tidy(axes)


def _above_the_roof(counted: Sequence[PrimitiveTime]) -> list[str]:
    """Why points stand above the roof, where some do."""
    above = [record for record in counted if 0.0 < _roof(record) < record.gflops]
    winograd = [record for record in above if "wino" in record.implementation]
    cached = [record for record in above if record not in winograd and _roof(record) < record.peak_gflops]
    notes = []
    if winograd:
        notes.append("above the roof: Winograd's algorithm multiplies less\nthan the direct arithmetic that is counted")
    if cached:
        notes.append("above the slope: operands that a cache still held")
    return notes


def _roof(record: PrimitiveTime) -> float:
    """GFLOP/s that the machine allows at most for so many operations per byte."""
    return min(record.peak_gflops, record.intensity * record.peak_gbytes_per_s)


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
