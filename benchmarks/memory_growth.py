"""Resident memory over hundreds of input sizes: ResNet-18 and a small BERT, each in a process of its own.

    python -m benchmarks.memory_growth --sizes 300 --chart docs/images/memory-growth.png

Every size is new, in a shuffled order, so each call lowers. Implementations are chosen by estimate (tune="off"), as
measuring hundreds of sizes takes hours; what is kept afterwards is the same. Needs torchvision, transformers and
matplotlib.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LEVEL_FROM = 60  # sizes: from there on memory is to be level


def resident_mib() -> float:
    """Return the resident memory of this process, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


def resnet18() -> tuple[torch.nn.Module, Any, Callable[[int], Any], range]:
    """The model, example inputs (None: none needed), the input of a size, and the sizes."""
    from tests.support.torchvision_models import build

    return build("resnet18"), None, lambda size: {"x": torch.randn(1, 3, size, size)}, range(33, 433)


def encoder(**sizes: Any) -> torch.nn.Module:
    """A BERT with random weights; sizes: as BertConfig takes them."""
    from tests.support.torchvision_models import import_torchvision

    import_torchvision()  # transformers imports it
    from transformers import BertConfig, BertModel

    model: torch.nn.Module = BertModel(BertConfig(**sizes), add_pooling_layer=False).eval()
    return model


def bert() -> tuple[torch.nn.Module, Any, Callable[[int], Any], range]:
    """As resnet18: four layers, 256 wide; the sizes are lengths."""
    model = encoder(
        vocab_size=5000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    return model, inputs_of_length(16), inputs_of_length, range(8, 408)


def inputs_of_length(length: int) -> dict[str, torch.Tensor]:
    """One sentence of that many tokens."""
    return {"input_ids": torch.ones(1, length, dtype=torch.long)}


MODELS = {"resnet18": resnet18, "bert": bert}


def measure(name: str, count: int) -> list[dict[str, float]]:
    """Call the model with `count` different sizes; return what was resident and kept after each, in MiB."""
    import zendnn_cffi

    model, example, make, sizes = MODELS[name]()
    fast = zendnn_cffi.optimize(model, example, tune="off")
    rows = []
    with torch.inference_mode(), zendnn_cffi.warm_up():
        for size in random.Random(0).sample(sizes, count):
            fast(**make(size))
            info = zendnn_cffi.cache_info()
            kept = {"arenas": info.arenas_bytes, "packed": info.packed_weights_bytes, "results": info.results_bytes}
            rows.append(
                {"resident": resident_mib(), "size": size, **{key: value / (1 << 20) for key, value in kept.items()}}
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def growth(rows: list[dict[str, float]]) -> float:
    """MiB that the last quarter takes more than those right after LEVEL_FROM: medians of a quarter's length."""
    resident = [row["resident"] for row in rows]
    length = max((len(rows) - LEVEL_FROM) // 4, 1)

    def median(values: list[float]) -> float:
        return sorted(values)[len(values) // 2]

    return median(resident[-length:]) - median(resident[LEVEL_FROM : LEVEL_FROM + length])


def draw(found: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Write the chart."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.0, 4.0), layout="constrained")
    for name, rows in found.items():
        axes.plot([row["resident"] for row in rows], label=f"{name}, resident")
    axes.axvline(LEVEL_FROM, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("different input sizes so far")
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure each model in a process of its own; print the growth, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, default=300)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--chart", type=Path)
    parser.add_argument("--in-this-process", action="store_true", help="print what is measured of one model, as JSON")
    options = parser.parse_args()
    if options.in_this_process:
        measure(options.models[0], options.sizes)
        return
    found = {}
    for name in options.models:
        command = [sys.executable, "-m", "benchmarks.memory_growth", "--in-this-process", "--models", name]
        done = subprocess.run([*command, "--sizes", str(options.sizes)], capture_output=True, text=True, check=True)
        found[name] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        print(f"{name}: {found[name][-1]}, growth from size {LEVEL_FROM} on {growth(found[name]):.0f} MiB")
    if options.chart:
        draw(found, options.chart)


if __name__ == "__main__":
    main()
