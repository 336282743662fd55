"""What a call takes beside other work: with fewer threads where that is faster, and with all of them.

    python -m benchmarks.beside_other_work resnet50 mobilenet_v2 --loops 1

Rounds take turns: alone, then beside so many busy loops, each way in turn. OpenVINO joins where it is installed.
Batch 1, float32. Needs torchvision.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

import zendnn_cffi
from fx_passes.region.region import ZenRegion

Run = Callable[[], Any]
SETTLES_SECONDS = 2.0  # before a window counts: other work has to be noticed


def contenders(name: str) -> dict[str, Run]:
    """Each way to run the network, warm."""
    from tests.support.torchvision_models import build

    x, model = torch.randn(1, 3, 224, 224), build(name)
    ours, all_threads = (zendnn_cffi.optimize(model, (x,)) for _ in range(2))
    found: dict[str, Run] = {"ours": lambda: ours(x), "all threads": lambda: all_threads(x)}
    found |= openvino(model, x)
    for run in found.values():
        for _ in range(10):
            run()
    keep_all_threads(all_threads)
    return found


def keep_all_threads(module: torch.nn.Module) -> None:
    """Let its regions compute with all threads, whatever else the machine does."""
    for region in module.modules():
        if isinstance(region, ZenRegion):
            for signature, lowered in region.programs.found.items():
                region.programs.found[signature] = lowered and replace(lowered, sharing=None)


def openvino(model: torch.nn.Module, x: torch.Tensor) -> dict[str, Run]:
    """OpenVINO's way, where it is installed."""
    try:
        import openvino as ov
    except ImportError:
        return {}
    hints = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    compiled = ov.Core().compile_model(ov.convert_model(model, example_input=x), "CPU", hints)
    request, array = compiled.create_infer_request(), x.numpy()
    return {"OpenVINO": lambda: request.infer([array])}


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def window(run: Run, seconds: float) -> list[float]:
    """Milliseconds of each call for so long, once it has settled; of the last one where a call takes longer."""
    times: list[float] = []
    begun = time.perf_counter()
    settled = begun + SETTLES_SECONDS
    while (now := time.perf_counter()) < settled + seconds or not times:
        run()
        ended = time.perf_counter()
        if now > settled or ended > settled + seconds:
            times.append(1e3 * (ended - now))
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="torchvision names")
    parser.add_argument("--loops", type=int, default=1, help="busy processes beside it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each window")
    options = parser.parse_args(arguments)
    print(f"{torch.get_num_threads()} threads; milliseconds a call: median (mean)")
    for name in options.models:
        runs, times = contenders(name), dict[tuple[str, int], list[float]]()
        with torch.no_grad():
            for _ in range(options.rounds):
                for loops in (0, options.loops):
                    with busy_loops(loops):
                        for way, run in runs.items():
                            times.setdefault((way, loops), []).extend(window(run, options.seconds))
        for (way, loops), found in sorted(times.items(), key=lambda item: item[0][1]):
            where = f"beside {loops} busy loops" if loops else "alone"
            print(f"{name}, {way}, {where}: {statistics.median(found):.2f} ({statistics.mean(found):.2f})", flush=True)


if __name__ == "__main__":
    main()
