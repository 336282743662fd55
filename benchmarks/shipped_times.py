"""Measure common networks for the times that ship with the package: `make shipped-times`.

    python benchmarks/shipped_times.py                              all networks, float32 and bf16, one and two threads
    python benchmarks/shipped_times.py --models resnet50 --batches 1 16

Each case runs in a process of its own, which measures what is not known yet; what other work disturbed is measured
again, up to three times. Then the file of this kind of CPU and number of threads is written, with what it held before.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the checkout comes last, so that an installed zendnn_cffi wins over the source tree
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parent.parent)]

from benchmarks.case import DTYPES, Case

CACHE = Path(__file__).resolve().parent / "out" / "shipped-times"
MODELS = (
    "resnet50", "mobilenet_v2", "resnet18", "bert-base-128", "minilm-32", "densenet121", "efficientnet_b0", "vit_b_16",
    "mobilenet_v3_large", "inception_v3", "googlenet", "squeezenet1_1", "shufflenet_v2_x1_0", "mnasnet1_0", "resnet34",
    "resnet101", "resnext50_32x4d", "wide_resnet50_2", "regnet_y_400mf", "convnext_tiny", "swin_t", "vgg16", "vgg11",
    "alexnet", "mobilenet_v3_small", "squeezenet1_0", "regnet_x_1_6gf", "efficientnet_b1", "densenet169", "resnet152",
)  # fmt: skip
_TRIES = 3


def measure(case: Case) -> bool:
    """Run one case; whether all of it was measured and kept."""
    import torch

    import zendnn_cffi
    from benchmarks import workloads
    from fx_passes.search.tuner import database_for

    torch.set_num_threads(case.threads)
    row = workloads.find(case.workload)
    inputs = row.inputs(case.batch)
    dtype = torch.bfloat16 if case.dtype == "bf16" else None
    model: Any = zendnn_cffi.optimize(row.build(calibrate=False), inputs, dtype=dtype, tune_seconds=math.inf)
    with torch.inference_mode():
        model(*inputs)
    database = database_for(case.threads)
    waiting = any(region.is_provisional for region in model.regions().values())
    return not waiting and len(database.as_kept()) == len(database)


def write(threads: int, cases: Sequence[Case]) -> Path:
    """Write what is known to the file of this kind of CPU."""
    from fx_passes.search import shipped
    from fx_passes.search.tuner import database_for
    from zendnn_cffi.engine.host import cpu_name

    path = shipped.path_of(shipped.machine(), threads)
    before = shipped.read(path)
    networks = {*(before.about["networks"] if before is not None else ()), *map(str, cases)}
    about = {"machine": shipped.machine(), "cpu": cpu_name(), "threads": threads, "networks": sorted(networks)}
    shipped.write(path, database_for(threads, own_only=True).measured(), about, before)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, then write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--threads", nargs="+", type=int, default=[2, 1])
    parser.add_argument("--seconds", type=float, default=math.inf, help="then no further case begins")
    parser.add_argument("--in-this-process", metavar="CASE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    os.environ["ZENDNN_CFFI_CACHE"] = str(CACHE)
    if options.in_this_process:
        sys.exit(0 if measure(Case.from_json(options.in_this_process)) else 1)
    begun = time.monotonic()
    done: list[Case] = []
    for threads, batch, dtype, model in itertools.product(
        options.threads, options.batches, options.dtypes, options.models
    ):
        case = Case(model, batch, dtype, threads)
        if time.monotonic() - begun > options.seconds:
            break
        since = time.monotonic()
        kept = _run(case)
        print(f"{case}: {time.monotonic() - since:.0f} s{'' if kept else ', not all of it kept'}", flush=True)
        done += [case] if kept else []
    for threads in options.threads:
        path = write(threads, [case for case in done if case.threads == threads])
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


def _run(case: Case) -> bool:
    environment = os.environ | {"OMP_NUM_THREADS": str(case.threads)}
    command = [sys.executable, __file__, "--in-this-process", case.to_json()]
    for _ in range(_TRIES):
        finished = subprocess.run(command, env=environment, capture_output=True, text=True)
        if finished.returncode == 0:
            return True
        if finished.returncode != 1 or finished.stderr:
            print((finished.stderr.strip().splitlines() or ["it ended"])[-1], file=sys.stderr)
    return False


if __name__ == "__main__":
    main()
