"""Transformer and recommender rows of the workload table. Hugging Face's need the transformers package."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workloads import Workload

_VOCABULARY = 30_000
TABLES, ROWS, WIDTH, BAG = 26, 100_000, 64, 10


class Last(nn.Module):
    """A Hugging Face model called with one positional input, its first output alone."""

    def __init__(self, model: nn.Module, **fixed: Any) -> None:
        super().__init__()
        self.model, self.fixed = model, fixed

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model(x, **self.fixed, return_dict=False)[0]
        return result


def _bert(calibrate: bool = True) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    return Last(transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False)).eval()


def _vit(calibrate: bool = True) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    return Last(transformers.ViTModel(transformers.ViTConfig(), add_pooling_layer=False)).eval()


def _llama(calibrate: bool = True) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, vocab_size=_VOCABULARY
    )
    return Last(transformers.LlamaForCausalLM(config), use_cache=False).eval()


class DLRM(nn.Module):
    """Dense features through a bottom MLP, categories through bags of embeddings, products of all pairs on top."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(TABLES))
        self.bottom = _mlp(13, 512, 256, WIDTH)
        pairs = (TABLES + 1) * TABLES // 2
        self.top = _mlp(WIDTH + pairs, 512, 256, 1)
        self.register_buffer("pairs", torch.tril_indices(TABLES + 1, TABLES + 1, -1), persistent=False)

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        """dense [N, 13], indices [N, TABLES, BAG]; returns [N, 1]."""
        low = self.bottom(dense)
        bags = [table(indices[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.cat([low, *bags], 1).view(dense.shape[0], TABLES + 1, WIDTH)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        result: Tensor = self.top(torch.cat([low, products[:, self.pairs[0], self.pairs[1]]], 1))
        return result


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _dlrm(calibrate: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return DLRM().eval()


def _ids(length: int, batch: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, _VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1)),)


def _images(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(1)),)


def _clicks(batch: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 13, generator=generator), torch.randint(
        0, ROWS, (batch, TABLES, BAG), generator=generator
    )


def text_rows() -> dict[str, Workload]:
    """The rows by name; a model is built only when asked for."""
    rows: list[tuple[str, Callable[..., nn.Module], Callable[[int], tuple[Tensor, ...]]]] = [
        ("bert-base-128", _bert, partial(_ids, 128)),
        ("vit-b-16", _vit, _images),
        ("llama-110m-prefill-256", _llama, partial(_ids, 256)),
        ("dlrm", _dlrm, _clicks),
    ]
    return {name: Workload(name, build, inputs) for name, build, inputs in rows}
