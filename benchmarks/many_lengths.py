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

Made = Callable[[], Callable[..., Any]]


def contenders(model: torch.nn.Module, names: list[str]) -> dict[str, Made]:
    """The makers of each: they return a callable of the model's keyword arguments."""
    known: dict[str, Made] = {
        "eager": lambda: model,
        "zendnn_cffi": lambda: zendnn_cffi.optimize(model, inputs_of_length(16)),
        "inductor": lambda: torch.compile(model, dynamic=True, options={"freezing": True}),
    }
    return {name: known[name] for name in names}


def measure(made: dict[str, Made], calls: int, longest: int) -> dict[str, list[float]]:
    """Milliseconds a call, over each tenth of the calls; the first has what making a contender took."""
    draw = random.Random(0)
    parts: dict[str, list[float]] = {name: [] for name in made}
    runs, making = dict[str, Callable[..., Any]](), dict[str, float]()
    with torch.no_grad():
        for name, make in made.items():
            begun = time.perf_counter()
            runs[name] = make()
            making[name] = time.perf_counter() - begun
        for part in range(10):
            spent = dict.fromkeys(runs, 0.0) if part else making
            for _ in range(calls // 10):
                given = inputs_of_length(draw.randint(1, longest))
                for name, run in runs.items():
                    begun = time.perf_counter()
                    run(**given)
                    spent[name] += time.perf_counter() - begun
            for name, seconds in spent.items():
                parts[name].append(round(seconds / (calls // 10) * 1e3, 2))
            print({name: times[-1] for name, times in parts.items()}, flush=True)
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
    made = contenders(model, arguments.contenders)
    print(json.dumps(measure(made, arguments.calls, arguments.longest)))


if __name__ == "__main__":
    main()
