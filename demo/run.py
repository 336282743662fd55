"""See zendnn_cffi work: train a digit classifier, then ResNet-50 on a photograph, eager and optimized side by side.

    make demo            or      python demo/run.py [--quick] [--out FOLDER]

Downloads nothing. ResNet-50's weights are random, with batch-norm statistics taken from photographs: its answers mean
nothing, but they must be the same before and after, and it costs what a trained one costs.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

if __name__ == "__main__":  # the checkout comes last, so that an installed zendnn_cffi wins over the source tree
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parent.parent)]

import zendnn_cffi
from demo import digits, screen, vision

FP32_TOLERANCE = 1e-4  # largest error relative to the largest output, 50 layers deep


def show_engine() -> bool:
    """Print what computes here; return whether it is ZenDNN."""
    screen.heading("The engine")
    if not zendnn_cffi.is_available():
        screen.line("ZenDNN", f"not available: {zendnn_cffi.unavailable_reason()}")
        screen.line("", "everything below runs, but in plain PyTorch")
        return False
    version = zendnn_cffi.lib.zendnn_version()
    screen.line("ZenDNN", f"{version.major}.{version.minor}.{version.patch} (zendnn_cffi.lib.zendnn_version())")
    screen.line("PyTorch", f"{torch.__version__}, {torch.get_num_threads()} threads")
    return True


def show_digits(epochs: int, tune: str) -> bool:
    """Train on digits; print accuracy before and after optimize; return whether fp32 agreed on every image."""
    screen.heading("A digit classifier, trained now")
    data = digits.load()
    with screen.Progress(f"training on {len(data.train_labels)} images", epochs) as progress:
        model = digits.train(data, progress, epochs=epochs)
    reference = digits.predict(model, data.test_images)
    screen.line(f"eager, {len(reference)} test images", f"accuracy {digits.accuracy(reference, data.test_labels):.2%}")
    agreed = {}
    for label, dtype in (("fp32", None), ("bf16", torch.bfloat16)):
        optimized = zendnn_cffi.optimize(model, (data.test_images,), dtype=dtype, tune=tune)
        predicted = digits.predict(optimized, data.test_images)
        same = int((predicted == reference).sum())
        agreed[label] = same == len(reference)
        screen.line(
            f"optimized, {label}",
            f"accuracy {digits.accuracy(predicted, data.test_labels):.2%}, same answer on {same} of {len(reference)}",
        )
    return agreed["fp32"]


def compare_resnet(rounds: int, tune: str) -> tuple[nn.Module, Tensor, dict[str, list[float]], bool]:
    """Run ResNet-50 on a photograph both ways; return (optimized, photograph, seconds per way, whether right)."""
    screen.heading("ResNet-50, batch 1, on a photograph")
    model = vision.build("resnet50", calibrate=False)
    vision.randomise(model, torch.cat([vision.photograph("china"), vision.photograph("flower")]))
    photograph = vision.photograph("china")
    began = time.perf_counter()
    optimized = zendnn_cffi.optimize(model, (photograph,), tune=tune)
    with torch.inference_mode():
        optimized(photograph)
        screen.line("optimize and first call", f"{time.perf_counter() - began:.1f} s")
        expected, answer = model(photograph), optimized(photograph)
        nhwc = copy.deepcopy(model).to(memory_format=torch.channels_last)
        ways = {"eager": model, "eager, channels_last": nhwc, "optimized": optimized}
        seconds = _interleaved(ways, photograph, rounds)
    error = ((answer - expected).abs().max() / expected.abs().max()).item()
    same_top5 = bool((answer.topk(5).indices == expected.topk(5).indices).all())
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        filled = screen.bar(median / max(medians.values()))
        screen.line(name, f"{filled} {median * 1e3:7.1f} ms   {median / medians['optimized']:.2f} x")
    screen.line("largest error / largest output", f"{error:.1e}, top five classes {'equal' if same_top5 else 'DIFFER'}")
    return optimized, photograph, seconds, error <= FP32_TOLERANCE


def _interleaved(models: dict[str, nn.Module], image: Tensor, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call; the models take turns, five calls a turn, so that both see the same machine."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    with screen.Progress("measuring, taking turns", rounds) as progress:
        for _ in range(rounds):
            for name, model in models.items():
                model(image)
                for _ in range(5):
                    began = time.perf_counter()
                    model(image)
                    seconds[name].append(time.perf_counter() - began)
            progress("  ".join(f"{statistics.median(values) * 1e3:.1f}" for values in seconds.values()) + " ms")
    return seconds


def show_implementations(records: list[Any]) -> None:
    """Print which implementations ran how many layers, and how long they took."""
    total_ns = sum(record.time_ns for record in records) or 1
    count = Counter((record.kind, record.implementation) for record in records)
    time_ns: Counter[tuple[str, str]] = Counter()
    for record in records:
        time_ns[record.kind, record.implementation] += record.time_ns
    screen.heading("What ran")
    for (kind, implementation), spent in time_ns.most_common():
        label = f"{count[kind, implementation]:3} x {kind}"
        screen.line(label, f"{screen.bar(spent / total_ns, 14)} {spent / 1e6:7.2f} ms  {implementation}")


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; return 0 if all answers were right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer epochs and rounds")
    parser.add_argument("--tune", default="auto", help="as optimize() takes it (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "out", metavar="FOLDER")
    options = parser.parse_args(arguments)

    available = show_engine()
    digits_agree = show_digits(3 if options.quick else 8, options.tune)
    optimized, photograph, seconds, right = compare_resnet(2 if options.quick else 10, options.tune)
    if available:
        from demo import chart

        with torch.inference_mode():
            records = list(zendnn_cffi.profile(optimized, photograph).records)
        show_implementations(records)
        file = chart.draw(records, photograph, seconds, options.out / "resnet50.png")
        screen.line("time per layer, as a chart", str(file))
    print()
    return 0 if digits_agree and right else 1


if __name__ == "__main__":
    sys.exit(main())
