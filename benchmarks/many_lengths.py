"""Texts of lengths drawn at random, beside eager and Inductor: a MiniLM-like encoder, batch 1, float32.

    python -m benchmarks.many_lengths --calls 4000

Each call has a length of 1 to --longest tokens; contenders take turns call by call, and begin with nothing measured
(set ZENDNN_CFFI_CACHE to an empty folder). Prints milliseconds a call of each, over each tenth of the calls, what
compiling took included. Needs transformers.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any

import torch

import zendnn_cffi
from benchmarks.memory_growth import encoder, inputs_of_length


def contenders(model: torch.nn.Module, names: list[str]) -> dict[str, Callable[..., Any]]:
    """Each a callable of the model's keyword arguments."""
    known: dict[str, Callable[[], Callable[..., Any]]] = {
        "eager": lambda: model,
        "zendnn_cffi": lambda: zendnn_cffi.optimize(model, inputs_of_length(16)),
        "inductor": lambda: torch.compile(model, dynamic=True, options={"freezing": True}),
    }
    return {name: known[name]() for name in names}


def measure(runs: dict[str, Callable[..., Any]], calls: int, longest: int) -> dict[str, list[float]]:
    """Milliseconds a call, over each tenth of the calls."""
    draw = random.Random(0)
    parts: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for _ in range(10):
            spent = dict.fromkeys(runs, 0.0)
            for _ in range(calls // 10):
                given = inputs_of_length(draw.randint(1, longest))
                for name, run in runs.items():
                    begun = time.perf_counter()
                    run(**given)
                    spent[name] += time.perf_counter() - begun
            for name, seconds in spent.items():
                parts[name].append(round(seconds / (calls // 10) * 1e3, 2))
            print({name: part[-1] for name, part in parts.items()}, flush=True)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--longest", type=int, default=128, help="tokens")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--size", type=int, default=384, help="of the hidden states")
    parser.add_argument("--contenders", nargs="+", default=["eager", "zendnn_cffi", "inductor"])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = encoder(
        hidden_size=arguments.size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=12,
        intermediate_size=4 * arguments.size,
    )
    runs = contenders(model, arguments.contenders)
    print(json.dumps(measure(runs, arguments.calls, arguments.longest)))


if __name__ == "__main__":
    main()
