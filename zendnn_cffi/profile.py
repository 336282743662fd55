"""profile(): where the time of an optimized module goes, primitive by primitive."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class PrimitiveTime:
    """One call of a program: median wall time over the runs.

    name            node of the graph ("a for b": the reorder of a's value for reader b)
    kind            primitive, "reorder" or "torch"
    implementation  the implementation that ran
    time_ns         median wall time
    flops           floating point operations, 0 where not counted
    """

    region: str
    name: str
    kind: str
    implementation: str
    time_ns: int
    flops: int

    @property
    def gflops(self) -> float:
        """Rate in GFLOP/s, 0 where operations are not counted."""
        return self.flops / self.time_ns if self.time_ns else 0.0


class Profile:
    """What profile() returns: print it, or read `.records` (PrimitiveTime, in execution order)."""

    def __init__(self, records: list[PrimitiveTime], total_ns: int) -> None:
        self.records = records
        self.total_ns = total_ns

    @property
    def primitives_ns(self) -> int:
        """Time inside calls; the rest of total_ns is Python and what stayed outside the regions."""
        return sum(record.time_ns for record in self.records)

    def __str__(self) -> str:
        width = max((len(r.name) for r in self.records), default=4)
        lines = [f"{'call':{width}}  {'kind':20} {'ms':>8} {'share':>6} {'GFLOP/s':>8}  implementation"]
        for r in self.records:
            share = r.time_ns / self.total_ns if self.total_ns else 0.0
            rate = f"{r.gflops:8.1f}" if r.flops else " " * 8
            lines.append(
                f"{r.name:{width}}  {r.kind:20} {r.time_ns / 1e6:8.3f} {share:6.1%} {rate}  {r.implementation}"
            )
        lines.append(
            f"total {self.total_ns / 1e6:.3f} ms, of which {self.primitives_ns / 1e6:.3f} ms inside these calls"
        )
        return "\n".join(lines)

    __repr__ = __str__


def profile(gm: fx.GraphModule, *inputs: Any, runs: int = 20) -> Profile:
    """Return the time of every call inside an optimized module's regions, on these inputs.

    gm      what optimize() returned
    inputs  positional arguments of one call
    runs    calls measured, after three that are not
    Raises  TypeError if gm is not an optimized module, ValueError for runs < 1.
    """
    import time

    from fx_passes.module import OptimizedModule
    from fx_passes.region import ZenRegion

    if not isinstance(gm, OptimizedModule):
        raise TypeError(f"profile() takes what zendnn_cffi.optimize() returned, got {type(gm).__name__}")
    if runs < 1:
        raise ValueError(f"runs must be at least 1, got {runs}")
    regions = [region for region in gm.regions().values() if isinstance(region, ZenRegion)]
    totals: list[int] = []
    with torch.inference_mode():
        for _ in range(3):
            gm(*inputs)
        for _ in range(runs):
            start = time.perf_counter_ns()
            gm(*inputs)
            totals.append(time.perf_counter_ns() - start)
        timed: dict[str, list[list[int]]] = {}
        calls: dict[str, Any] = {}
        with _timing(regions, timed, calls):
            for _ in range(runs):
                gm(*inputs)
    records = []
    for name, runs_ns in timed.items():
        for position, call in enumerate(calls[name]):
            median = int(statistics.median(times[position] for times in runs_ns))
            records.append(PrimitiveTime(name, call.name, call.kind, call.implementation, median, call.flops))
    return Profile(records, int(statistics.median(totals)))


class _timing:
    """While open, regions time each call of their programs."""

    def __init__(self, regions: list[Any], timed: dict[str, list[list[int]]], calls: dict[str, Any]) -> None:
        self.regions, self.timed, self.calls = regions, timed, calls

    def __enter__(self) -> None:
        for region in self.regions:
            region.on_run = self._record

    def __exit__(self, *_: object) -> None:
        for region in self.regions:
            region.on_run = None

    def _record(self, region: Any, program: Any, inputs: Any) -> list[torch.Tensor]:
        outputs, times_ns = program.run_timed(inputs)
        self.timed.setdefault(region.name, []).append(times_ns)
        self.calls[region.name] = program.calls
        return list(outputs)
