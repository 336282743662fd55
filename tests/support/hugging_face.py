"""Small Hugging Face models with random weights, one of every kind: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.support.torchvision_models import import_torchvision

VOCABULARY, WIDTH, LAYERS, HEADS, INNER = 99, 32, 2, 4, 48
IMAGE, PATCH = 32, 8


@dataclass(frozen=True)
class Row:
    """One model.

    name       what the names of its class and of its configuration's class begin with
    inputs     its keyword arguments
    products   inner products of one call: projections of one input that only move data afterwards are one
    config     arguments of the configuration
    head       ending of the class's name
    plain      linears outside of regions: those of constants that only plain PyTorch reads
    """

    name: str
    inputs: Callable[[], dict[str, Tensor]]
    products: int
    config: dict[str, Any]
    head: str = "Model"
    plain: int = 0

    def build(self) -> nn.Module:
        """The model in evaluation mode, the same weights each time."""
        import_torchvision()  # transformers imports it, which fails where its compiled part does not load
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{self.name}Config")(**self.config)
        model: nn.Module = getattr(transformers, self.name + self.head)(config)
        return model.eval()


def ids(length: int = 9, batch: int = 2, seed: int = 1) -> Tensor:
    """Token ids [batch, length] that are no special tokens."""
    return torch.randint(5, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def noise(*shape: int) -> Tensor:
    """Normally distributed float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _text() -> dict[str, Tensor]:
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    return {"input_ids": ids(), "attention_mask": mask}


def _tokens() -> dict[str, Tensor]:
    return {"input_ids": ids()}


def _pair() -> dict[str, Tensor]:
    return {"input_ids": ids(), "decoder_input_ids": ids(5)}


def _image() -> dict[str, Tensor]:
    return {"pixel_values": noise(2, 3, IMAGE, IMAGE)}


_STACK = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": INNER}
_ENCODER = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, **_STACK}
_DECODER = {**_ENCODER, "num_key_value_heads": 2}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BOTH = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    **{f"{side}_layers": LAYERS for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": INNER for side in ("encoder", "decoder")},
}
_RELATIVE = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
}
_BLOCKS = 4 * LAYERS  # of each layer: query, key and value in one; output; up; down
_GATED = 5 * LAYERS  # gate and up are two
_SCALED = 5 * LAYERS  # the query has a scale as its post-op: key and value in one
_CROSSED = 2 * LAYERS + 1  # query and output of what is attended to; keys and values of all layers in one

MODELS: dict[str, Row] = {
    "bert": Row("Bert", _text, _BLOCKS + 1, _ENCODER),
    "roberta": Row("Roberta", _text, _BLOCKS + 1, _ENCODER),
    "distilbert": Row(
        "DistilBert",
        _text,
        _BLOCKS,
        {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": INNER},
    ),
    "electra": Row("Electra", _text, _BLOCKS + 1, {**_ENCODER, "embedding_size": 16}),
    "deberta-v2": Row("DebertaV2", _text, _BLOCKS, {**_ENCODER, **_RELATIVE}, plain=LAYERS),
    "gpt2": Row(
        "GPT2",
        _text,
        _BLOCKS + 1,
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64},
        "LMHeadModel",
    ),
    "opt": Row(
        "OPT",
        _text,
        _SCALED + 1,
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "word_embed_proj_dim": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "ffn_dim": INNER,
            "max_position_embeddings": 64,
        },
        "ForCausalLM",
    ),
    "llama": Row("Llama", _tokens, _GATED + 1, _DECODER, "ForCausalLM"),
    "mistral": Row("Mistral", _text, _GATED + 1, {**_DECODER, "sliding_window": 4}, "ForCausalLM"),
    "qwen2": Row("Qwen2", _tokens, _GATED + 1, _DECODER, "ForCausalLM"),
    "phi": Row("Phi", _tokens, _BLOCKS + 1, _DECODER, "ForCausalLM"),
    "t5": Row(
        "T5",
        _pair,
        2 * _BLOCKS + _CROSSED + 1,
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "d_kv": 8,
            "d_ff": INNER,
            "num_layers": LAYERS,
            "num_heads": HEADS,
        },
        "ForConditionalGeneration",
    ),
    "bart": Row(
        "Bart", _pair, 2 * _BLOCKS + _CROSSED + 1, {**_BOTH, "max_position_embeddings": 64}, "ForConditionalGeneration"
    ),
    "vit": Row("ViT", _image, _BLOCKS + 1, {**_STACK, "image_size": IMAGE, "patch_size": PATCH}),
    "swin": Row(
        "Swin",
        _image,
        4 * 2 + 1,
        {
            "image_size": IMAGE,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "window_size": 4,
        },
    ),
    "clip": Row(
        "CLIP",
        lambda: {**_tokens(), **_image()},
        2 * _BLOCKS + 2,
        {
            "text_config": {**_ENCODER, **_SPECIAL},
            "vision_config": {**_STACK, "image_size": IMAGE, "patch_size": PATCH},
            "projection_dim": 16,
        },
    ),
    "whisper": Row(
        "Whisper",
        lambda: {"input_features": noise(2, 8, 32), "decoder_input_ids": ids(5)},
        2 * _SCALED + _CROSSED + 1,
        {
            **_BOTH,
            **_SPECIAL,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "decoder_start_token_id": 3,
        },
        "ForConditionalGeneration",
    ),
}


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of an output in order, those of key-value caches included."""
    found = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__"):
            found += tensors_of(vars(leaf))
    return found
