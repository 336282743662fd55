"""profile(): where the time of an optimized model goes, primitive by primitive, and how near to the machine's peak."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fx_passes.report.explanation import is_torch
from fx_passes.report.records import PrimitiveTime
from zendnn_cffi.engine.host import cpu_generation, cpu_name

_DERIVED = ("gflops", "gbytes_per_s", "intensity", "bound", "peak_share")


class Profile:
    """What profile() returns: print it, plot it, or read `.records` (PrimitiveTime, in execution order).

    total_ns  median wall time of a call of the module, timed without timing its parts
    alone_ns  what the calls would take at least with these kernels: the fastest implementation of each operation in any
              layout, measured alone with its operands in cache, and no reorders; 0 where that was not measured
    about     what was measured and where: the model, shapes of its inputs, data types, CPU and threads
    """

    def __init__(self, records: Sequence[PrimitiveTime], total_ns: int, alone_ns: int = 0, about: str = "") -> None:
        self.records = list(records)
        self.total_ns = total_ns
        self.alone_ns = alone_ns
        self.about = about

    @property
    def primitives_ns(self) -> int:
        """Time inside calls; the rest of total_ns is Python and what stayed outside the regions."""
        return sum(record.time_ns for record in self.records)

    @property
    def engine_ns(self) -> int:
        """Time inside calls of the library's primitives."""
        return sum(record.time_ns for record in self.records if not is_torch(record.implementation))

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a dict per record, rates and shares included: pandas.DataFrame(profile.to_dicts())."""
        return [{**asdict(record), **{name: getattr(record, name) for name in _DERIVED}} for record in self.records]

    def plot(self, target: Any = None) -> Any:
        """Draw the time of every call, and all of them under the machine's roofline; return the matplotlib figure.

        target  path of an image to write, a pair of matplotlib axes to draw on, or None: a new figure
        Raises  ImportError without matplotlib.
        """
        from fx_passes.report.profile_plot import draw

        return draw(self.records, self.total_ns, self.about, target)

    def __str__(self) -> str:
        width = max((len(r.name) for r in self.records), default=4)
        head = f"{'call':{width}}  {'kind':20} {'ms':>8} {'share':>6} {'GFLOP/s':>8} {'GB/s':>7}  {'of peak':15}"
        first = [*filter(None, [self.about]), f"{head}  implementation"]
        return "\n".join([*first, *(self._line(r, width) for r in self.records), *self._summary()])

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

    module        what optimize() returned, a module with such modules in it, what torch.compile made of one, or a model
                  whose forward was replaced
    inputs        arguments of one call, named_inputs those given by name
    runs          calls measured, after three that are not
    Raises        TypeError if there is no region in it, ValueError for runs < 1.

    The first profile() of a process also measures the peak (about a second).
    """
    import time

    from fx_passes.module import OptimizedModule
    from fx_passes.report.compiled import is_compiled, replaced_forwards

    if runs < 1:
        raise ValueError(f"runs must be at least 1, got {runs}")
    waits = isinstance(module, OptimizedModule) or is_compiled(module) or replaced_forwards(module)
    if not _regions(module) and not waits:
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
    records = _records(timing, runs)
    about = _about(module, (inputs, named_inputs), records)
    found = Profile(records, int(statistics.median(totals)), _alone_ns(timing, runs), about)
    _latest[module] = found
    return found


_latest: WeakKeyDictionary[Any, Profile] = WeakKeyDictionary()


def latest_profile(module: Any) -> Profile | None:
    """The last profile() of a module or compiled function, None where there was none."""
    return _latest.get(module)


def _own_regions(module: Any) -> list[Any]:
    from fx_passes.module import OptimizedModule
    from fx_passes.region.region import ZenRegion
    from fx_passes.report.compiled import replaced_forwards

    parts = list(module.modules()) if isinstance(module, torch.nn.Module) else []
    for modules in replaced_forwards(module).values():
        parts += [part for each in modules for part in each.modules()]
    for part in (part for part in list(parts) if isinstance(part, OptimizedModule)):
        parts += [inner for each in part.optimized_submodules.values() for inner in each.modules()]
    return [own for part in parts if isinstance(part, ZenRegion) for own in part.with_packed]


def _regions(module: Any) -> list[Any]:
    """The module's regions; where it holds none, all there are: torch.compile keeps its own out of sight."""
    from fx_passes.region.region import living_regions

    return _own_regions(module) or living_regions()


def _no_regions(module: Any) -> TypeError:
    return TypeError(
        f"profile() takes what zendnn_cffi.optimize() returned, a module that contains it, one with a replaced forward,"
        f' or one compiled with backend="zendnn"; {type(module).__name__} runs no region'
    )


def _records(timing: _Timing, runs: int) -> list[PrimitiveTime]:
    from fx_passes.report.peak import peak_gbytes_per_s, peak_gflops

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


def _about(module: Any, inputs: Any, records: Sequence[PrimitiveTime]) -> str:
    """The model, what it was called with, what it computes in, and where."""
    from torch.utils import _pytree as pytree

    own = getattr(module, "_orig_mod", module)
    name = type(own).__name__ if isinstance(own, torch.nn.Module) else getattr(own, "__name__", type(own).__name__)
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    shapes = " ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors)
    times: dict[str, int] = {}
    for record in records:
        if record.flops:
            times[record.dtype] = times.get(record.dtype, 0) + record.time_ns
    dtypes = " and ".join(sorted(times, key=times.__getitem__, reverse=True))
    threads = torch.get_num_threads()
    where = f"{cpu_name()} ({cpu_generation()}), {threads} thread{'s' * (threads != 1)}"
    return ", ".join(filter(None, (name, shapes, dtypes, where)))


def _alone_ns(timing: _Timing, runs: int) -> int:
    """The sum over the programs that ran; 0 where one of them was lowered without measuring."""
    lowered = [found for region in timing.regions for found in region.lowered.values() if found]
    known = {found.program: found.alone_ns for found in lowered}
    times = [max(round(len(own) / runs), 1) * known.get(program, 0.0) for (_, program), own in timing.times.items()]
    return int(sum(times)) if all(times) else 0


_Called = tuple[str, Any]  # a region's name, its program


class _Timing:
    """While open, regions time each call of their programs: times by (region's name, program), a list per run.

    Those of this thread: what other threads call meanwhile is no part of a run. Where this one makes no calls, the
    module makes them in threads of its own, and all count.
    """

    def __init__(self, regions: list[Any]) -> None:
        self.regions = regions
        self._own, self._others = dict[_Called, list[list[int]]](), dict[_Called, list[list[int]]]()
        self._thread = get_ident()

    @property
    def times(self) -> dict[_Called, list[list[int]]]:
        return self._own or self._others

    def __enter__(self) -> _Timing:
        for region in self.regions:
            region.on_run = self._record
        return self

    def __exit__(self, *_: object) -> None:
        for region in self.regions:
            region.on_run = None

    def _record(self, region: Any, program: Any, inputs: Any) -> list[torch.Tensor]:
        outputs, times_ns = program.run_timed(inputs)
        times = self._own if get_ident() == self._thread else self._others
        times.setdefault((region.name, program), []).append(times_ns)
        return list(outputs)
