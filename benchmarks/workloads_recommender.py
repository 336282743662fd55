"""The recommender row of the workload table: a deep learning recommendation model (DLRM) as MLPerf's, smaller."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.workloads import Workload

TABLES, ROWS, WIDTH, BAG = 26, 100_000, 64, 10


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


def _clicks(batch: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 13, generator=generator), torch.randint(
        0, ROWS, (batch, TABLES, BAG), generator=generator
    )


def recommender_rows() -> dict[str, Workload]:
    """The rows by name."""
    return {"dlrm": Workload("dlrm", _dlrm, _clicks)}
