"""generate() through torch.compile: the ways of decoding one after the other, each call by a graph of ours."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tolerance import assert_close
from zendnn_cffi.backend import CompiledGraph
from zendnn_cffi.cli.libraries import imported

SIZES = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 120,
    "max_position_embeddings": 64, "head_dim": 8, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1,
    "num_hidden_layers": 1,
}  # fmt: skip

# Rows of the prompt, its length, and arguments of generate.
WAYS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "padded texts": (3, 7, {}),
    "beams": (1, 6, {"num_beams": 2}),
    "in chunks": (2, 9, {"prefill_chunk_size": 4}),
    "static cache": (2, 5, {"cache_implementation": "static", "disable_compile": True}),
}


@pytest.fixture
def graph_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Grows by one number for each call of a captured graph."""
    called: list[int] = []
    run = CompiledGraph.__call__

    def counted(graph: CompiledGraph, *args: Any) -> Any:
        called.append(len(args))
        return run(graph, *args)

    monkeypatch.setattr(CompiledGraph, "__call__", counted)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64), torch.no_grad():
        yield called
    torch._dynamo.reset()


def model_of() -> Any:
    torch.manual_seed(0)
    transformers: Any = imported("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def prompt_of(rows: int, length: int) -> dict[str, Tensor]:
    """Texts of which all but the last are padded on the left."""
    ids = torch.randint(2, 120, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    for row in range(rows - 1):
        mask[row, : row + 1] = ids[row, : row + 1] = 0
    return {"input_ids": ids, "attention_mask": mask}


def compiled(model: Any, forwards: list[int]) -> Any:
    """Compile the forward of model; forwards grows by one number for each call of it."""
    forward = torch.compile(model.forward, backend="zendnn", options={"tune": "off"})

    def counted(*args: Any, **kwargs: Any) -> Any:
        forwards.append(len(kwargs))
        return forward(*args, **kwargs)

    counted.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]  # generate() asks for it
    model.forward = counted
    return model


def test_every_way_of_decoding_runs_by_graphs(graph_calls: list[int]) -> None:
    """One model, whose kinds of calls TorchDynamo's limit of 8 would leave to plain PyTorch."""
    forwards: list[int] = []
    eager, fast = model_of(), compiled(model_of(), forwards)
    for way, (rows, length, how) in WAYS.items():
        arguments = {**prompt_of(rows, length), **how, "max_new_tokens": 3, "do_sample": False}
        expected = eager.generate(**arguments, return_dict_in_generate=True, output_logits=True)
        graph_calls.clear(), forwards.clear()
        result = fast.generate(**arguments, return_dict_in_generate=True, output_logits=True)
        assert torch.equal(result.sequences, expected.sequences), way
        assert len(graph_calls) == len(forwards) > 0, way
        for step, other in zip(result.logits, expected.logits, strict=True):
            assert_close(step, other, k=SIZES["hidden_size"])


def test_a_static_cache_whose_heads_are_given_as_a_term(graph_calls: list[int]) -> None:
    """TorchDynamo gives the number of the cache's heads as a SymInt there, though it is the weights'."""
    eager, fast = model_of(), model_of()
    fast.forward = torch.compile(fast.forward, backend="zendnn", dynamic=True, options={"tune": "off"})
    arguments = {**prompt_of(1, 9), **WAYS["static cache"][2], "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(fast.generate(**arguments), eager.generate(**arguments))
    assert len(graph_calls) == 4


def test_a_text_goes_on_with_the_cache_of_eager_pytorch(graph_calls: list[int]) -> None:
    eager, fast, prompt = model_of(), compiled(model_of(), []), prompt_of(1, 5)
    how = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    expected = eager.generate(**prompt, **{**how, "max_new_tokens": 6})
    first = eager.generate(**prompt, **how)
    mask = torch.ones_like(first.sequences)
    result = fast.generate(input_ids=first.sequences, attention_mask=mask, past_key_values=first.past_key_values, **how)
    assert torch.equal(result.sequences, expected.sequences)
    assert len(graph_calls) == 3
