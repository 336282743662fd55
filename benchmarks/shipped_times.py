"""Measure common networks for the times that ship with the package: `make shipped-times`.

    python benchmarks/shipped_times.py                              all networks and dtypes, one and two threads
    python benchmarks/shipped_times.py --models resnet50 --batches 1 16
    python benchmarks/shipped_times.py --seconds 190                a piece of it; the next run goes on where it was

A process for each number of threads measures one case after another: what is not known yet, and again, up to three
times, what other work disturbed (the least time counts then). Every implementation is measured, also those that an
estimate gives no prospects: whatever a later version estimates, it finds its prospects on record, and estimates are
learned from all of them. After each case that is complete, the file of this kind of CPU and number of threads is
written, with what it held before; cases that it names are done. An interrupt (SIGINT) loses the operation in hand
alone: results are kept in benchmarks/out/shipped-times.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # the checkout comes last, so that an installed zendnn_cffi wins over the source tree
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parent.parent)]

from benchmarks.case import DTYPES, QUANTIZED, Case

if TYPE_CHECKING:
    from torch import nn

    from benchmarks.workloads import Workload
    from fx_passes.search.database import Result

CACHE = Path(__file__).resolve().parent / "out" / "shipped-times"
MODELS = (
    "resnet50", "mobilenet_v2", "resnet18", "bert-base-128", "minilm-32", "densenet121", "efficientnet_b0", "vit_b_16",
    "mobilenet_v3_large", "inception_v3", "googlenet", "squeezenet1_1", "shufflenet_v2_x1_0", "mnasnet1_0", "resnet34",
    "resnet101", "resnext50_32x4d", "wide_resnet50_2", "regnet_y_400mf", "convnext_tiny", "swin_t", "vgg16", "vgg11",
    "alexnet", "mobilenet_v3_small", "squeezenet1_0", "regnet_x_1_6gf", "efficientnet_b1", "densenet169", "resnet152",
)  # fmt: skip
# Of these 8-bit integers are measured: with scales of a calibration, which times do not depend on, or of each call.
STATIC = (*MODELS[:11], "vgg16")
DYNAMIC = ("bert-base-128", "minilm-32")
_TRIES = 3
_CALIBRATION_CALLS = 2
_GRACE_SECONDS = 5.0  # from an interrupt to the end of a process: a measurement ends first


def measure(case: Case) -> bool:
    """Run one case; whether all of it was measured and kept.

    What was disturbed each time has the least of its times: a disturbance only ever makes it longer.
    """
    import torch

    import zendnn_cffi
    from benchmarks import workloads
    from fx_passes.search.tuner import database_for

    torch.set_num_threads(case.threads)
    row = workloads.find(case.workload)
    inputs = row.inputs(case.batch)
    dtype = torch.bfloat16 if case.dtype == "bf16" else None
    original = _quantized(row, case) if case.is_quantized else row.build(calibrate=False)
    disturbed: dict[str, Result] = {}
    for _ in range(_TRIES):
        database_for.cache_clear()  # what was disturbed is in no file
        database = database_for(case.threads, own_only=True)
        try:
            model: Any = zendnn_cffi.optimize(original, inputs, dtype=dtype, tune="full")
            with torch.inference_mode():
                model(*inputs)
        finally:
            database.save()
        known, kept = database.measured(), database.as_kept().measured()
        for key in known.keys() - kept.keys():
            disturbed[key] = min(known[key], disturbed.get(key, known[key]), key=lambda result: result.time_ns)
        if not known.keys() - kept.keys():
            break
    for key, result in disturbed.items():
        if key not in kept and result.right:
            database.put(key, result)
    database.save()
    return len(database.as_kept()) == len(database) and not any(r.is_provisional for r in model.regions().values())


def _quantized(row: Workload, case: Case) -> nn.Module:
    """The network's graph as torchao has it, in 8-bit integers."""
    import zendnn_cffi

    calls = [row.inputs(case.batch) for _ in range(_CALIBRATION_CALLS)]
    made = zendnn_cffi.quantize(row.build(), calls, dynamic=case.is_dynamic, tune="off", compare=False)
    return made.converted


def write(threads: int, cases: Sequence[Case]) -> Path:
    """Write what is known to the file of this kind of CPU."""
    from fx_passes.search import shipped
    from fx_passes.search.tuner import database_for
    from zendnn_cffi.engine.host import cpu_name

    path = shipped.path_of(shipped.machine(), threads)
    before = shipped.read(path)
    about = {"machine": shipped.machine(), "cpu": cpu_name(), "threads": threads}
    networks = {"networks": sorted(done(threads).union(map(str, cases)))}
    shipped.write(path, database_for(threads, own_only=True).as_kept().measured(), about | networks, before)
    return path


def done(threads: int) -> frozenset[str]:
    """The cases that the file of this kind of CPU names."""
    from fx_passes.search import shipped

    known = shipped.read(shipped.path_of(shipped.machine(), threads))
    return frozenset(known.about["networks"] if known is not None else ())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write."""
    networks = dict.fromkeys(DTYPES, MODELS) | dict(zip(QUANTIZED, (STATIC, DYNAMIC), strict=True))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", metavar="NAME", help="(default: those of each dtype)")
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--dtypes", nargs="+", choices=[*networks], default=[*networks])
    parser.add_argument("--threads", nargs="+", type=int, default=[2, 1])
    parser.add_argument("--seconds", type=float, default=math.inf, help="then it ends, in the midst of a case, too")
    parser.add_argument("--again", action="store_true", help="also what the file says is done")
    parser.add_argument("--in-this-process", metavar="CASES", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    os.environ["ZENDNN_CFFI_CACHE"] = str(CACHE)
    if options.in_this_process:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
        _measure_all(options.in_this_process, options.again)
        return
    until = time.monotonic() + options.seconds - _GRACE_SECONDS
    for threads in options.threads:
        cases = [
            Case(model, batch, dtype, threads)
            for batch, dtype in itertools.product(options.batches, options.dtypes)
            for model in options.models or networks[dtype]
        ]
        _run(cases, until, options.again)


def _run(cases: Sequence[Case], until: float, again: bool) -> None:
    """Measure cases in a process of their own, a further one where it dies; interrupt it at a time of our clock."""
    left = list(cases)
    while left and (seconds := until - time.monotonic()) > 0:
        command = [sys.executable, __file__, "--in-this-process", json.dumps([case.to_json() for case in left])]
        environment = os.environ | {"OMP_NUM_THREADS": str(left[0].threads)}
        process = subprocess.Popen([*command, *["--again"] * again], env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), process.send_signal, [signal.SIGINT])
        timer.start()
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                left.pop(0)
        finally:
            timer.cancel()
            if process.wait() and time.monotonic() < until and left:
                print(f"{left.pop(0)}: the process ended", flush=True)


def _measure_all(cases: str, again: bool) -> None:
    """Measure cases, given as JSON: a line for each."""
    try:
        for case in map(Case.from_json, json.loads(cases)):
            if not again and str(case) in done(case.threads):
                print(f"{case}: on record", flush=True)
                continue
            since = time.monotonic()
            kept = measure(case)
            path = write(case.threads, [case] if kept else [])
            size = f"{path.name} {path.stat().st_size / 1e3:.0f} kB"
            result = size if kept else "not all of it was kept"
            print(f"{case}: {time.monotonic() - since:.0f} s, {result}", flush=True)
            gc.collect()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)


if __name__ == "__main__":
    main()
