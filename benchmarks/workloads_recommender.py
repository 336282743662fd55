"""The recommender rows of the workload table: a deep learning recommendation model (DLRM) as MLPerf's, smaller."""

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
        return self.interact(dense, [table(indices[:, i]) for i, table in enumerate(self.tables)])

    def interact(self, dense: Tensor, bags: list[Tensor]) -> Tensor:
        """dense [N, 13], bags [N, WIDTH] each; returns [N, 1]."""
        low = self.bottom(dense)
        stacked = torch.cat([low, *bags], 1).view(dense.shape[0], TABLES + 1, WIDTH)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        result: Tensor = self.top(torch.cat([low, products[:, self.pairs[0], self.pairs[1]]], 1))
        return result


class OffsetsDLRM(DLRM):
    """The same with bags between offsets, as recommenders in production have them."""

    def forward(self, dense: Tensor, offsets: Tensor, *indices: Tensor) -> Tensor:
        """dense [N, 13], offsets [TABLES, N], indices [any number] per table; returns [N, 1]."""
        bags = [table(i, offsets[k]) for k, (table, i) in enumerate(zip(self.tables, indices, strict=True))]
        return self.interact(dense, bags)


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _dlrm(calibrate: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return DLRM().eval()


def _dlrm_offsets(calibrate: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return OffsetsDLRM().eval()


def _clicks(batch: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 13, generator=generator), torch.randint(
        0, ROWS, (batch, TABLES, BAG), generator=generator
    )


def _clicks_between_offsets(batch: int) -> tuple[Tensor, ...]:
    """The same clicks, a flat tensor of indices per table; offsets [TABLES, N], evenly spaced."""
    dense, indices = _clicks(batch)
    offsets = (torch.arange(batch) * BAG).repeat(TABLES, 1)
    return dense, offsets, *(indices[:, t].reshape(-1) for t in range(TABLES))


def recommender_rows() -> dict[str, Workload]:
    """The rows by name."""
    rows = (Workload("dlrm", _dlrm, _clicks), Workload("dlrm_offsets", _dlrm_offsets, _clicks_between_offsets))
    return {row.name: row for row in rows}
