"""generate() with a static cache through torch.compile: eager's tokens, and heads of keys that are not repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zendnn_cffi.backend
from zendnn_cffi.cli.libraries import imported

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 120, "max_position_embeddings": 64, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Phi3"])
def test_steps_read_grouped_keys_where_they_lie(family: str) -> None:
    torch.manual_seed(0)
    transformers: Any = imported("transformers")
    config: Any = getattr(transformers, f"{family}Config")(**SIZES, pad_token_id=0, eos_token_id=None, bos_token_id=1)
    model: Any = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    prompt = {"input_ids": torch.tensor([[2, 3, 4, 5]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}
    how = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    with torch.no_grad():
        expected = model.generate(**prompt, **how)
        torch._dynamo.reset()
        model.forward = torch.compile(model.forward, backend="zendnn", options={"tune": "off"})
        assert torch.equal(model.generate(**prompt, **how), expected)
    steps = zendnn_cffi.backend.compiled_modules()[-1]
    graphs = [steps.graph, *(region.graph for region in steps.regions().values())]
    called = [getattr(node.target, "__name__", str(node.target)) for graph in graphs for node in graph.nodes]
    assert called.count("attention") == config.num_hidden_layers
    assert not [node for graph in graphs for node in graph.nodes if str(node.target) == "expand" and _is_cache(node)]


def _is_cache(node: torch.fx.Node) -> bool:
    """Whether a node repeats heads: five dimensions of a cache."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.ndim == 5
