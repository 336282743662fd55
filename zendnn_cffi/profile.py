"""profile(): where the time of an optimized model goes, primitive by primitive, and how near to the machine's peak."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class PrimitiveTime:
    """One call of a program: median wall time over the runs, summed where one run makes the call several times.

    region             name of the region it is in
    name               node of the graph ("a for b": the reorder of a's value for reader b)
    kind               primitive, "reorder" or "torch"
    implementation     the implementation that ran
    time_ns            median wall time
    flops              floating point operations, counted as direct arithmetic; 0 where not counted
    bytes_moved        bytes of operands, weights and result, each once, wherever they lie
    dtype              data type of the source, such as "float32"
    peak_gflops        what this machine does at most in this dtype (zendnn_cffi.peak), 0 where not measured
    peak_gbytes_per_s  what its memory gives at most
    """

    region: str
    name: str
    kind: str
    implementation: str
    time_ns: int
    flops: int
    bytes_moved: int = 0
    dtype: str = ""
    peak_gflops: float = 0.0
    peak_gbytes_per_s: float = 0.0

    @property
    def gflops(self) -> float:
        """Rate in GFLOP/s, 0 where operations are not counted."""
        return self.flops / self.time_ns if self.time_ns else 0.0

    @property
    def gbytes_per_s(self) -> float:
        """Rate in GB/s."""
        return self.bytes_moved / self.time_ns if self.time_ns else 0.0

    @property
    def intensity(self) -> float:
        """Floating point operations per byte."""
        return self.flops / self.bytes_moved if self.bytes_moved else 0.0

    @property
    def bound(self) -> str:
        """What the roofline says bounds it: "arithmetic", or "memory" if its bytes came from there."""
        return "arithmetic" if self._arithmetic_share > self._memory_share else "memory"

    @property
    def peak_share(self) -> float:
        """Share of the peak of what bounds it. Above 1: Winograd's algorithm, or bytes that were in a cache."""
        return max(self._arithmetic_share, self._memory_share)

    @property
    def _arithmetic_share(self) -> float:
        return self.gflops / self.peak_gflops if self.peak_gflops else 0.0

    @property
    def _memory_share(self) -> float:
        return self.gbytes_per_s / self.peak_gbytes_per_s if self.peak_gbytes_per_s else 0.0


_DERIVED = ("gflops", "gbytes_per_s", "intensity", "bound", "peak_share")


class Profile:
    """What profile() returns: print it, plot it, or read `.records` (PrimitiveTime, in execution order).

    total_ns  median wall time of a call of the module, timed without timing its parts
    alone_ns  what the calls would take at least with these kernels: the fastest implementation of each operation in any
              layout, measured alone with its operands in cache, and no reorders; 0 where that was not measured
    """

    def __init__(self, records: Sequence[PrimitiveTime], total_ns: int, alone_ns: int = 0) -> None:
        self.records = list(records)
        self.total_ns = total_ns
        self.alone_ns = alone_ns

    @property
    def primitives_ns(self) -> int:
        """Time inside calls; the rest of total_ns is Python and what stayed outside the regions."""
        return sum(record.time_ns for record in self.records)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a dict per record, rates and shares included: pandas.DataFrame(profile.to_dicts())."""
        return [{**asdict(record), **{name: getattr(record, name) for name in _DERIVED}} for record in self.records]

    def plot(self, target: Any = None) -> Any:
        """Draw the time of every call, and all of them under the machine's roofline; return the matplotlib figure.

        target  path of an image to write, a pair of matplotlib axes to draw on, or None: a new figure
        Raises  ImportError without matplotlib.
        """
        from zendnn_cffi.profile_plot import draw

        return draw(self, target)

    def __str__(self) -> str:
        width = max((len(r.name) for r in self.records), default=4)
        head = f"{'call':{width}}  {'kind':20} {'ms':>8} {'share':>6} {'GFLOP/s':>8} {'GB/s':>7}  {'of peak':15}"
        return "\n".join([f"{head}  implementation", *(self._line(r, width) for r in self.records), *self._summary()])

    def _line(self, r: PrimitiveTime, width: int) -> str:
        share = r.time_ns / self.total_ns if self.total_ns else 0.0
        rate = f"{r.gflops:8.1f}" if r.flops else " " * 8
        peak = f"{r.peak_share:4.0%} {r.bound}" if r.peak_share else ""
        times = f"{r.time_ns / 1e6:8.3f} {share:6.1%} {rate} {r.gbytes_per_s:7.1f}"
        return f"{r.name:{width}}  {r.kind:20} {times}  {peak:15}  {r.implementation}"

    def _summary(self) -> list[str]:
        lines = [f"total {self.total_ns / 1e6:.3f} ms, of which {self.primitives_ns / 1e6:.3f} ms inside these calls"]
        if self.alone_ns:
            alone = f"{self.alone_ns / 1e6:.3f} ms"
            lines.append(f"the fastest implementation of each operation, alone, its operands in cache: {alone}")
        peaks = {f"{r.peak_gflops:.0f} GFLOP/s {r.dtype}": None for r in self.records if r.peak_gflops}
        memory = {f"{r.peak_gbytes_per_s:.0f} GB/s memory": None for r in self.records if r.peak_gbytes_per_s}
        return [*lines, f"peak measured here: {', '.join([*peaks, *memory])}"] if memory else lines

    __repr__ = __str__


def profile(module: Callable[..., Any], *inputs: Any, runs: int = 20, **named_inputs: Any) -> Profile:
    """Return the time of every call inside a model's regions, on these inputs, beside this machine's peak.

    module        what optimize() returned, a module with such modules in it, or what torch.compile made of one
    inputs        arguments of one call, named_inputs those given by name
    runs          calls measured, after three that are not
    Raises        TypeError if there is no region in it, ValueError for runs < 1.

    The first profile() of a process also measures the peak (about a second).
    """
    import time

    from fx_passes.module import OptimizedModule

    if runs < 1:
        raise ValueError(f"runs must be at least 1, got {runs}")
    if not _regions(module) and not isinstance(module, OptimizedModule) and not _is_compiled(module):
        raise _no_regions(module)
    totals: list[int] = []
    with torch.inference_mode():
        for _ in range(3):
            module(*inputs, **named_inputs)
        for _ in range(runs):
            start = time.perf_counter_ns()
            module(*inputs, **named_inputs)
            totals.append(time.perf_counter_ns() - start)
        with _Timing(_regions(module)) as timing:
            for _ in range(runs):
                module(*inputs, **named_inputs)
    if not timing.times and not isinstance(module, OptimizedModule) and not _own_regions(module):
        raise _no_regions(module)
    return Profile(_records(timing, runs), int(statistics.median(totals)), _alone_ns(timing, runs))


def _own_regions(module: Any) -> list[Any]:
    from fx_passes.region import ZenRegion

    parts = module.modules() if isinstance(module, torch.nn.Module) else ()
    return [part for part in parts if isinstance(part, ZenRegion)]


def _regions(module: Any) -> list[Any]:
    """The module's regions; where it holds none, all there are: torch.compile keeps its own out of sight."""
    from fx_passes.region import living_regions

    return _own_regions(module) or living_regions()


def _is_compiled(module: Any) -> bool:
    """Whether torch.compile made it: its first call, which may be yet to come, makes the regions."""
    return hasattr(module, "_torchdynamo_orig_callable") or hasattr(module, "_orig_mod")


def _no_regions(module: Any) -> TypeError:
    return TypeError(
        f"profile() takes what zendnn_cffi.optimize() returned, a module that contains it, or one compiled with"
        f' backend="zendnn"; {type(module).__name__} runs no region'
    )


def _records(timing: _Timing, runs: int) -> list[PrimitiveTime]:
    from zendnn_cffi.peak import peak_gbytes_per_s, peak_gflops

    threads = torch.get_num_threads()
    bandwidth = peak_gbytes_per_s(threads) if timing.times else 0.0
    records = []
    for (region, program), runs_ns in timing.times.items():
        times = max(round(len(runs_ns) / runs), 1)  # a loop over a region calls its program more than once a run
        for position, call in enumerate(program.calls):
            records.append(
                PrimitiveTime(
                    region=region,
                    name=call.name,
                    kind=call.kind,
                    implementation=call.implementation,
                    time_ns=times * int(statistics.median(run_ns[position] for run_ns in runs_ns)),
                    flops=times * program.slices * call.flops,
                    bytes_moved=times * program.slices * call.bytes_moved,
                    dtype=str(call.dtype).removeprefix("torch."),
                    peak_gflops=peak_gflops(call.dtype, threads) if call.flops and call.dtype else 0.0,
                    peak_gbytes_per_s=bandwidth,
                )
            )
    return records


def _alone_ns(timing: _Timing, runs: int) -> int:
    """The sum over the programs that ran; 0 where one of them was lowered without measuring."""
    lowered = [found for region in timing.regions for found in region.lowered.values() if found]
    known = {found.program: found.alone_ns for found in lowered}
    times = [max(round(len(own) / runs), 1) * known.get(program, 0.0) for (_, program), own in timing.times.items()]
    return int(sum(times)) if all(times) else 0


class _Timing:
    """While open, regions time each call of their programs: times by (region's name, program), a list per run."""

    def __init__(self, regions: list[Any]) -> None:
        self.regions = regions
        self.times: dict[tuple[str, Any], list[list[int]]] = {}

    def __enter__(self) -> _Timing:
        for region in self.regions:
            region.on_run = self._record
        return self

    def __exit__(self, *_: object) -> None:
        for region in self.regions:
            region.on_run = None

    def _record(self, region: Any, program: Any, inputs: Any) -> list[torch.Tensor]:
        outputs, times_ns = program.run_timed(inputs)
        self.times.setdefault((region.name, program), []).append(times_ns)
        return list(outputs)
