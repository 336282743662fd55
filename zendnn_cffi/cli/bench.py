"""`bench`: a model in processes of their own, one per contender and instance, which take turns.

latency     one process on all cores each; rounds in which every contender runs for a while
throughput  instances that run at once, for each size of batch: the best is the answer
realtime    instances of a few cores that run at once, a sample a call unless --batch says more
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from zendnn_cffi.cli.contenders import CONTENDERS, installed
from zendnn_cffi.cli.errors import CommandError
from zendnn_cffi.cli.models import find
from zendnn_cffi.engine import host

_ROUNDS = 6


class Process:
    """A worker; see worker.py. A context manager."""

    def __init__(self, job: dict[str, Any]) -> None:
        root, threads = str(Path(__file__).resolve().parents[2]), str(job["threads"])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "zendnn_cffi.cli.worker", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        )

    def begin(self, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Raises CommandError where the process ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise CommandError(f"a process of the benchmark ended with status {self.process.wait()}")
        return json.loads(line)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout):
            if end is not None:
                end.close()


def percentile_ms(times_ns: Sequence[int], percent: int) -> float:
    """Return the time that so many percent of the calls do not exceed, in ms."""
    ordered = sorted(times_ns)
    return ordered[min(len(ordered) - 1, -(-len(ordered) * percent // 100) - 1)] / 1e6


def _job(args: argparse.Namespace, name: str, batch: int, cores: Sequence[int], threads: int) -> dict[str, Any]:
    return {
        "model": args.model,
        "contender": name,
        "batch": batch,
        "dtype": args.dtype,
        "cores": list(cores),
        "threads": threads,
    }


def latency(args: argparse.Namespace, names: Sequence[str], cores: Sequence[int]) -> list[dict[str, Any]]:
    """Rows with ms of a call; contenders take turns."""
    threads = args.threads or len(cores)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        running = []
        for name in names:  # one after the other: preparing measures
            process = stack.enter_context(Process(_job(args, name, args.batch, cores, threads)))
            about = _ready(process)
            rows.append({"mode": "latency", "contender": name, "batch": args.batch, "threads": threads, **about})
            if "failed" not in about:
                running.append((rows[-1], process, list[int]()))
        for _ in range(_ROUNDS):
            for _, process, times in running:
                process.begin(args.seconds / _ROUNDS)
                times += process.answer()
        for row, _, times in running:
            row |= _latency_of(times)
            row["per_second"] = 1e3 * args.batch / row["p50_ms"]
    return rows


def _latency_of(times: Sequence[int]) -> dict[str, float]:
    return {f"p{percent}_ms": percentile_ms(times, percent) for percent in (50, 90, 99)} | {"calls": len(times)}


def _ready(process: Process) -> dict[str, Any]:
    try:
        return dict(process.answer())
    except CommandError as error:
        return {"failed": str(error)}


def together(args: argparse.Namespace, name: str, batch: int, n: int, cores: Sequence[int]) -> dict[str, Any]:
    """A row of n instances that run at once, each on its share of these cores."""
    share = len(cores) // n
    threads = min(share, args.threads or share)
    row = {"contender": name, "batch": batch, "instances": n, "threads": threads}
    with ExitStack() as stack:
        running: list[Process] = []
        for number in range(n):  # the first one's measurements serve the others
            own = cores[number * share : (number + 1) * share]
            running.append(stack.enter_context(Process(_job(args, name, batch, own, threads))))
            about = _ready(running[-1])
            if "failed" in about:
                return row | about
        for process in running:
            process.begin(args.seconds)
        times = [process.answer() for process in running]
    rate = sum(batch * len(own) * 1e9 / sum(own) for own in times)
    return row | about | _latency_of([each for own in times for each in own]) | {"per_second": rate}


def throughput(args: argparse.Namespace, names: Sequence[str], cores: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of all batches and numbers of instances; `best` marks each contender's best."""
    counts = args.instances or sorted({1, len(cores)})
    rows = []
    for name in names:
        own = [together(args, name, batch, n, cores) for batch in args.batches for n in counts]
        own = [{"mode": "throughput", **row} for row in own]
        max(own, key=lambda row: row.get("per_second", 0.0))["best"] = True
        rows += own
    return rows


def realtime(args: argparse.Namespace, names: Sequence[str], cores: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of as many instances of --cores cores as there is room for, `--batch` samples a call."""
    n = len(cores) // args.cores
    return [{"mode": "realtime", **together(args, name, args.batch, n, cores[: n * args.cores])} for name in names]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as text; of throughput each contender's best."""
    head = ("mode", "contender", "batch", "instances", "threads", "p50 ms", "p90 ms", "p99 ms", "/ s", "error", "")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        if row["mode"] == "throughput" and not row.get("best"):
            continue
        first = [str(row.get(name, 1)) for name in ("mode", "contender", "batch", "instances", "threads")]
        if "failed" in row:
            lines.append((*first, *[""] * 5, row["failed"]))
            continue
        own = next(r for r in rows if r["mode"] == row["mode"] and (r.get("best") or row["mode"] != "throughput"))
        ratio = f"{row['per_second'] / own['per_second']:.2f}x" if own.get("per_second") else ""
        times = [f"{row[f'p{percent}_ms']:.2f}" for percent in (50, 90, 99)]
        lines.append((*first, *times, f"{row['per_second']:,.1f}", f"{row['error']:.0e}", ratio))
    widths = [max(map(len, column)) for column in list(zip(*lines, strict=True))[:-1]] + [0]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _draw(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    modes = list(dict.fromkeys(row["mode"] for row in rows))
    figure = Figure(figsize=(5 * len(modes) + 1, 3.6), layout="constrained")
    for axes, mode in zip(figure.subplots(1, len(modes), squeeze=False)[0], modes, strict=True):
        shown = [row for row in rows if row["mode"] == mode and "failed" not in row]
        shown = [row for row in shown if row.get("best") or mode != "throughput"]
        unit = "p50_ms" if mode == "latency" else "per_second"
        bars = axes.barh([row["contender"] for row in shown], [row[unit] for row in shown], color="#9db7d5")
        for bar, row in zip(bars, shown, strict=True):
            bar.set_color("#d5482f" if row["contender"] == "zendnn_cffi" else "#9db7d5")
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title(f"{mode}: {'ms of a call, less is better' if unit == 'p50_ms' else 'samples a second'}")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def bench(args: argparse.Namespace) -> int:
    """Measure, print, write; see main.py for the arguments. Returns 1 where ours failed."""
    found = find(args.model, args.batch)
    cores = sorted(os.sched_getaffinity(0))[: host.usable_cpus()]
    names = installed(found) if args.beside is None else list(dict.fromkeys(["zendnn_cffi", *args.beside]))
    _refuse(args, names, cores)
    if found.batch is not None:  # no other can be had
        args.batch, args.batches = found.batch, [found.batch]
    title = f"{found.name}, {args.dtype}, {host.cpu_name()}, {len(cores)} CPUs"
    print(title, flush=True)
    modes = {"latency": latency, "throughput": throughput, "realtime": realtime}
    rows = []
    for mode in modes if args.mode == "all" else (args.mode,):
        rows += modes[mode](args, names, cores)
    print(table(rows))
    print("last column: samples a second, relative to zendnn_cffi; error: relative to eager in float32")
    spread = [row["p90_ms"] / row["p50_ms"] for row in rows if row["mode"] == "latency" and "p50_ms" in row]
    if spread and statistics.median(spread) > 1.25:
        print("note: times vary much; other work on this machine disturbs the measurement")
    if args.json:
        args.json.write_text(json.dumps({"title": title, "rows": list(map(_for_json, rows))}, indent=1) + "\n")
    if args.png:
        _draw(rows, title, args.png)
    return 1 if any("failed" in row for row in rows if row["contender"] == "zendnn_cffi") else 0


def _for_json(row: dict[str, Any]) -> dict[str, Any]:
    """The row with null for what is not a number, which JSON does not have."""
    known = {name: value for name, value in row.items() if not isinstance(value, float) or math.isfinite(value)}
    return dict.fromkeys(row) | known


def _refuse(args: argparse.Namespace, names: Sequence[str], cores: Sequence[int]) -> None:
    """Say at once what could only fail after minutes."""
    for name in names:
        if name not in CONTENDERS:
            raise CommandError(f"no contender {name!r}: there are {', '.join(CONTENDERS)}")
    if args.cores > len(cores) or max(args.instances or [1]) > len(cores):
        raise CommandError(f"this process may use {len(cores)} CPUs: ask for as many cores and instances at most")
    for path in filter(None, (args.json, args.png)):
        if not path.absolute().parent.is_dir():
            raise CommandError(f"no folder {str(path.parent)!r} for {path.name}")
        if path.is_dir():
            raise CommandError(f"{str(path)!r} is a folder: name a file in it")
    if args.png:
        import importlib.util

        if importlib.util.find_spec("matplotlib") is None:
            raise CommandError("--png needs matplotlib: pip install matplotlib, or zendnn_cffi[plot]")
