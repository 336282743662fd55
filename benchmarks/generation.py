"""Text by transformers' `generate` with a static cache: prompts and steps, eager PyTorch beside compilers, in turns.

    python -m benchmarks.generation
    python -m benchmarks.generation --weights bf16 int4 --texts 2 --prompt 256

A Llama with random weights, in one process. A step's time is the difference between a short and a long answer, divided
by the tokens between them. Logits of the first step are compared with eager's, as some compilers answer wrongly.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zendnn_cffi.engine.host import cpu_generation, cpu_name

WEIGHTS = ("float32", "bf16", "int8", "int8-bf16", "int4")
BACKENDS = ("eager", "zendnn", "inductor", "zentorch")  # the last one in its own environment: see peers.py
_DEFAULT = BACKENDS[:3]
_REGISTERED_BY = {"zendnn": "zendnn_cffi", "zentorch": "zentorch"}
_UNCOUNTED = 4  # turns
_SHORT = 2  # tokens: the prompt's own and one step, which compiles what steps need


def llama(layers: int, width: int, tokens: int) -> nn.Module:
    """A causal model with random weights, float32."""
    from zendnn_cffi.cli.libraries import imported

    transformers = imported("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        vocab_size=tokens,
        max_position_embeddings=2048,
    )
    return transformers.LlamaForCausalLM(config).eval()


def with_weights(model: nn.Module, weights: str) -> nn.Module:
    """A copy of the model in what `weights` names: of the last three, linear layers by torchao's quantize_()."""
    model = copy.deepcopy(model)
    if weights in ("bf16", "int8-bf16", "int4"):
        model = model.to(torch.bfloat16)
    if weights.startswith("int8"):
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        quantize_(model, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
    if weights == "int4":
        from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import quantize_

        quantize_(model, PrototypeInt4WeightOnlyConfig(group_size=128, set_inductor_config=False))
    return model


@dataclass
class Side:
    """One backend's model.

    answer   prompt and number of new tokens -> the tokens
    error    largest difference of logits from eager's, relative to their largest: of the prompt, of a step where both
             took the same token; NaN: eager's own
    """

    backend: str
    answer: Callable[[Tensor, int], Any]
    prompts_ms: list[float] = field(default_factory=list)
    steps_ms: list[float] = field(default_factory=list)
    error: float = float("nan")

    @classmethod
    def made(cls, model: nn.Module, backend: str) -> Side:
        model = copy.deepcopy(model)
        if backend in _REGISTERED_BY:
            importlib.import_module(_REGISTERED_BY[backend])
        if backend != "eager":
            model.forward = torch.compile(model.forward, backend=backend)

        def answer(prompt: Tensor, tokens: int) -> Any:
            return model.generate(
                prompt,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                do_sample=False,
                cache_implementation="static",
                pad_token_id=0,
                disable_compile=True,
                return_dict_in_generate=True,
                output_logits=True,
            )

        return cls(backend, answer)

    def take_turn(self, prompt: Tensor, tokens: int) -> None:
        """Time the prompt with one step, and an answer of so many tokens."""
        begun = time.perf_counter()
        self.answer(prompt, 1)
        middle = time.perf_counter()
        self.answer(prompt, 1 + tokens)
        ended = time.perf_counter()
        self.prompts_ms.append((middle - begun) * 1e3)
        self.steps_ms.append(((ended - middle) - (middle - begun)) * 1e3 / tokens)


def compare(
    model: nn.Module, weights: str, backends: Sequence[str], prompt: Tensor, tokens: int, rounds: int
) -> list[Side]:
    """Sides that took turns. A backend that raises is left out, and said so."""
    quantized = with_weights(model, weights)
    sides: list[Side] = []
    expected: Any = None
    for backend in backends:
        try:
            side = Side.made(quantized, backend)
            for _ in range(3):
                found = side.answer(prompt, _SHORT)
        except Exception as error:
            print(f"{weights}, {backend}: {type(error).__name__}: {str(error).splitlines()[0][:160]}", flush=True)
            continue
        if backend == "eager":
            expected = found
        elif expected is not None:
            same = torch.equal(found.sequences[:, :-1], expected.sequences[:, :-1])
            errors = [*map(_difference, found.logits[: 1 + same], expected.logits)]
            side.error = float(np.max(errors))  # NaN stays
        sides.append(side)
    for _ in range(_UNCOUNTED + rounds):
        for side in sides:
            side.take_turn(prompt, tokens)
    for side in sides:  # a cache of another length is another kind of call: compiled and measured in the first turns
        del side.prompts_ms[:_UNCOUNTED], side.steps_ms[:_UNCOUNTED]
    return sides


def _difference(logits: Tensor, expected: Tensor) -> float:
    return float((logits.float() - expected.float()).abs().max() / expected.abs().max())


def rows(weights: str, sides: Sequence[Side]) -> list[list[str]]:
    """A row for each side: medians, how many times as fast as eager PyTorch with quartiles, error."""
    eager = next((side for side in sides if side.backend == "eager"), None)
    found = []
    for side in sides:
        row = [weights, side.backend]
        for own, other in ((side.prompts_ms, eager and eager.prompts_ms), (side.steps_ms, eager and eager.steps_ms)):
            text = f"{statistics.median(own):.1f}"
            if other and side is not eager:
                low, middle, high = statistics.quantiles([b / a for a, b in zip(own, other, strict=True)], n=4)
                text += f" ({middle:.2f}, {low:.2f} to {high:.2f})"
            row.append(text)
        found.append([*row, "" if side is eager else f"{side.error:.0e}"])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=__doc__.splitlines()[0])
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=_DEFAULT)
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=24, help="steps of each answer")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=8000)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_grad_enabled(False)
    from torch._dynamo import config as dynamo_config
    from torch._inductor import config as inductor_config

    inductor_config.freezing = True
    dynamo_config.recompile_limit = 64
    model = llama(options.layers, options.width, options.vocabulary)
    prompt = torch.randint(
        0, options.vocabulary, (options.texts, options.prompt), generator=torch.Generator().manual_seed(1)
    )
    head = ["weights", "by", "prompt, ms (eager / it)", "step, ms (eager / it)", "error"]
    where = f"{cpu_name()} ({cpu_generation()}), {torch.get_num_threads()} threads"
    print(f"{where}; {options.texts} x {options.prompt} tokens and {options.tokens} steps", flush=True)
    table = list(
        itertools.chain.from_iterable(
            rows(weights, compare(model, weights, options.backends, prompt, options.tokens, options.rounds))
            for weights in options.weights
        )
    )
    print("\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *table]))


if __name__ == "__main__":
    main()
