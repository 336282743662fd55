"""Hugging Face models with random weights, one of every kind, small or larger: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.support.torchvision_models import import_torchvision


@dataclass(frozen=True)
class Size:
    """What models are made of, and what they are given.

    head, width, inner  features of an attention head, of the residual stream, and inside of the feed-forward part
    length, batch       tokens a text, and texts or images a call
    """

    vocabulary: int = 99
    width: int = 32
    layers: int = 2
    heads: int = 4
    inner: int = 48
    image: int = 32
    patch: int = 8
    length: int = 9
    batch: int = 2
    mels: int = 8

    @property
    def head(self) -> int:
        return self.width // self.heads


SMALL = Size()
MEDIUM = Size(8000, 384, 4, 6, 1536, image=112, patch=16, length=128, batch=1, mels=80)
VOCABULARY, WIDTH, LAYERS, HEADS = SMALL.vocabulary, SMALL.width, SMALL.layers, SMALL.heads


@dataclass(frozen=True)
class Row:
    """One model.

    name       what the names of its class and of its configuration's class begin with
    inputs     its keyword arguments
    products   inner products of one call: projections of one input that only move data afterwards are one
    config     arguments of the configuration
    head       ending of the class's name
    """

    name: str
    inputs: Callable[[], dict[str, Tensor]]
    products: int
    config: dict[str, Any]
    head: str = "Model"

    def build(self) -> nn.Module:
        """The model in evaluation mode, the same weights each time."""
        import_torchvision()  # transformers imports it, which fails where its compiled part does not load
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{self.name}Config")(**self.config)
        model: nn.Module = getattr(transformers, self.name + self.head)(config)
        return model.eval()


def ids(length: int = 9, batch: int = 2, seed: int = 1, vocabulary: int = VOCABULARY) -> Tensor:
    """Token ids [batch, length] that are no special tokens."""
    return torch.randint(5, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def noise(*shape: int) -> Tensor:
    """Normally distributed float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class _Inputs:
    """Keyword arguments for models of one size."""

    size: Size

    def tokens(self) -> dict[str, Tensor]:
        return {"input_ids": ids(self.size.length, self.size.batch, vocabulary=self.size.vocabulary)}

    def text(self) -> dict[str, Tensor]:
        """Tokens; the last text is shorter than the others."""
        mask = torch.ones(self.size.batch, self.size.length, dtype=torch.int64)
        mask[-1, self.size.length * 2 // 3 :] = 0
        return {**self.tokens(), "attention_mask": mask}

    def decoder_tokens(self) -> dict[str, Tensor]:
        length = self.size.length // 2 + 1
        return {"decoder_input_ids": ids(length, self.size.batch, vocabulary=self.size.vocabulary)}

    def pair(self) -> dict[str, Tensor]:
        return {**self.tokens(), **self.decoder_tokens()}

    def image(self) -> dict[str, Tensor]:
        return {"pixel_values": noise(self.size.batch, 3, self.size.image, self.size.image)}

    def captioned(self) -> dict[str, Tensor]:
        return {**self.tokens(), **self.image()}

    def speech(self) -> dict[str, Tensor]:
        return {"input_features": noise(self.size.batch, self.size.mels, self.size.image), **self.decoder_tokens()}


_RELATIVE = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def models(size: Size = SMALL) -> dict[str, Row]:
    """A model of every kind, of this size."""
    inputs, most = _Inputs(size), max(64, 2 * size.length)
    vocabulary = {"vocab_size": size.vocabulary}
    stack = {
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": size.inner,
    }
    encoder = {**vocabulary, "max_position_embeddings": most, **stack}
    decoder = {**encoder, "num_key_value_heads": size.heads // 2}
    both = {
        **vocabulary,
        "d_model": size.width,
        **{f"{side}_layers": size.layers for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": size.heads for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": size.inner for side in ("encoder", "decoder")},
    }
    image = {"image_size": size.image, "patch_size": size.patch}
    blocks = 4 * size.layers  # of each layer: query, key and value in one; output; up; down
    gated = 5 * size.layers  # gate and up are two
    scaled = 5 * size.layers  # the query has a scale as its post-op: key and value in one
    crossed = 2 * size.layers + 1  # query and output of what is attended to; keys and values of all layers in one
    return {
        "bert": Row("Bert", inputs.text, blocks + 1, encoder),
        "roberta": Row("Roberta", inputs.text, blocks + 1, {**encoder, "max_position_embeddings": most + 2}),
        "distilbert": Row(
            "DistilBert",
            inputs.text,
            blocks,
            {
                **vocabulary,
                "dim": size.width,
                "n_layers": size.layers,
                "n_heads": size.heads,
                "hidden_dim": size.inner,
            },
        ),
        "electra": Row("Electra", inputs.text, blocks + 1, {**encoder, "embedding_size": size.width // 2}),
        "deberta-v2": Row("DebertaV2", inputs.text, blocks, {**encoder, **_RELATIVE}),
        "gpt2": Row(
            "GPT2",
            inputs.text,
            blocks + 1,
            {
                **vocabulary,
                "n_embd": size.width,
                "n_layer": size.layers,
                "n_head": size.heads,
                "n_positions": most,
            },
            "LMHeadModel",
        ),
        "opt": Row(
            "OPT",
            inputs.text,
            scaled + 1,
            {
                **vocabulary,
                "hidden_size": size.width,
                "word_embed_proj_dim": size.width,
                "num_hidden_layers": size.layers,
                "num_attention_heads": size.heads,
                "ffn_dim": size.inner,
                "max_position_embeddings": most,
            },
            "ForCausalLM",
        ),
        "llama": Row("Llama", inputs.tokens, gated + 1, decoder, "ForCausalLM"),
        "mistral": Row(
            "Mistral", inputs.text, gated + 1, {**decoder, "sliding_window": size.length // 2}, "ForCausalLM"
        ),
        "qwen2": Row("Qwen2", inputs.tokens, gated + 1, decoder, "ForCausalLM"),
        "phi": Row("Phi", inputs.tokens, blocks + 1, decoder, "ForCausalLM"),
        "t5": Row(
            "T5",
            inputs.pair,
            2 * blocks + crossed + 1,
            {
                **vocabulary,
                "d_model": size.width,
                "d_kv": size.head,
                "d_ff": size.inner,
                "num_layers": size.layers,
                "num_heads": size.heads,
            },
            "ForConditionalGeneration",
        ),
        "bart": Row(
            "Bart",
            inputs.pair,
            2 * blocks + crossed + 1,
            {**both, "max_position_embeddings": most},
            "ForConditionalGeneration",
        ),
        "vit": Row("ViT", inputs.image, blocks + 1, {**stack, **image}),
        "swin": Row(
            "Swin",
            inputs.image,
            4 * 2 + 1,
            {
                "image_size": size.image,
                "patch_size": size.patch // 4,
                "embed_dim": size.width // 2,
                "depths": [1, 1],
                "num_heads": [2, 4],
                "window_size": size.image // size.patch,
            },
        ),
        "clip": Row(
            "CLIP",
            inputs.captioned,
            2 * blocks + 2,
            {
                "text_config": {**encoder, **_SPECIAL},
                "vision_config": {**stack, **image},
                "projection_dim": size.width // 2,
            },
        ),
        "whisper": Row(
            "Whisper",
            inputs.speech,
            2 * scaled + crossed + 1,
            {
                **both,
                **_SPECIAL,
                "num_mel_bins": size.mels,
                "max_source_positions": size.image // 2,
                "max_target_positions": most // 2,
                "decoder_start_token_id": 3,
            },
            "ForConditionalGeneration",
        ),
    }


MODELS = models()


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of an output in order, those of key-value caches included."""
    found = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__"):
            found += tensors_of(vars(leaf))
    return found
