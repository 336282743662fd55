"""Rows of networks written out here: audio, fields, graphs, tables and recommenders."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads_recommender import DLRM, OffsetsDLRM
from tests.families.rows import Row

AUDIO, FIELDS, GRAPHS, TABLES, RECOMMENDERS = "audio", "fields", "graphs", "tables", "recommenders"
_USERS, _ITEMS, _WORDS = 20_000, 30_000, 50_000


class Demucs(nn.Module):
    """Waveforms through strided convolutions with gates, an LSTM in both directions, and the way back."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        channels = 2
        for level in range(depth):
            own = width * 2**level
            self.down.append(
                nn.Sequential(nn.Conv1d(channels, own, 8, 4), nn.ReLU(), nn.Conv1d(own, 2 * own, 1), nn.GLU(1))
            )
            last = [nn.ConvTranspose1d(own, channels, 8, 4), *([nn.ReLU()] if level else [])]
            self.up.insert(0, nn.Sequential(nn.Conv1d(own, 2 * own, 3, padding=1), nn.GLU(1), *last))
            channels = own
        self.lstm = nn.LSTM(channels, channels, 2, bidirectional=True)
        self.out = nn.Linear(2 * channels, channels)

    def forward(self, wave: Tensor) -> Tensor:
        """wave [N, 2, T]; returns the same shape."""
        x, kept = wave, []
        for down in self.down:
            x = down(x)
            kept.append(x)
        x = self.out(self.lstm(x.permute(2, 0, 1))[0]).permute(1, 2, 0)
        for up in self.up:
            x = up(x + kept.pop()[..., : x.shape[-1]])
        return x


class KeywordSpotter(nn.Module):
    """Separable 1-D convolutions over mel spectrograms, as in MatchboxNet."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        blocks: list[nn.Module] = [nn.Conv1d(64, width, 11, 2, 5), nn.BatchNorm1d(width), nn.ReLU()]
        for kernel in (13, 15, 17):
            blocks += [
                nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width),
                nn.Conv1d(width, width, 1),
                nn.BatchNorm1d(width),
                nn.ReLU(),
            ]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width, 35)

    def forward(self, mels: Tensor) -> Tensor:
        """mels [N, 64, T]; returns [N, 35]."""
        return self.head(F.adaptive_avg_pool1d(self.blocks(mels), 1).flatten(1))


class Nerf(nn.Module):
    """Eight layers of a radiance field, with the angles of each point, and its position again in the middle."""

    def __init__(self, width: int = 256, octaves: int = 10) -> None:
        super().__init__()
        self.octaves = octaves
        own = 3 + 6 * octaves
        widths = [own, width, width, width, width + own, width, width, width]
        self.layers = nn.ModuleList(nn.Linear(each, width) for each in widths)
        self.density, self.colour = (
            nn.Linear(width, 1),
            nn.Sequential(nn.Linear(width + 27, 128), nn.ReLU(), nn.Linear(128, 3)),
        )

    def _angles(self, x: Tensor, octaves: int) -> Tensor:
        scaled = [x * 2.0**k for k in range(octaves)]
        return torch.cat([x, *(torch.sin(s) for s in scaled), *(torch.cos(s) for s in scaled)], -1)

    def forward(self, points: Tensor, views: Tensor) -> Tensor:
        """points, views [N, 3]; returns [N, 4]: colour and density."""
        x = place = self._angles(points, self.octaves)
        for number, layer in enumerate(self.layers):
            if number == 4:
                x = torch.cat([x, place], -1)
            x = F.relu(layer(x))
        colour = self.colour(torch.cat([x, self._angles(views, 4)], -1))
        return torch.cat([colour.sigmoid(), F.softplus(self.density(x))], -1)


class GraphNetwork(nn.Module):
    """Three rounds of messages along edges, summed where they arrive."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first = nn.Linear(32, width)
        self.messages = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(3)
        )
        self.updates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """nodes [V, 32], edges [2, E]; returns [V, 10]."""
        x = self.first(nodes)
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = message(torch.cat([x[edges[0]], x[edges[1]]], -1))
            arrived = torch.zeros_like(x).index_add(0, edges[1], sent)
            x = x + F.relu(update(torch.cat([x, arrived], -1)))
        return self.head(x)


class Tabular(nn.Module):
    """Forty columns of categories, each with its embedding, beside numbers, through a network of three layers."""

    def __init__(self, columns: int = 40, numbers: int = 20) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(100 + 50 * column, 8 + column % 5) for column in range(columns))
        self.norm = nn.BatchNorm1d(numbers)
        width = sum(each.embedding_dim for each in self.embeddings) + numbers
        layers: list[nn.Module] = []
        for out in (400, 200):
            layers += [nn.Linear(width, out), nn.ReLU(), nn.BatchNorm1d(out), nn.Dropout(0.1)]
            width = out
        self.layers = nn.Sequential(*layers, nn.Linear(width, 2))

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        """categories [N, 40], numbers [N, 20]; returns [N, 2]."""
        columns = [each(categories[:, number]) for number, each in enumerate(self.embeddings)]
        return self.layers(torch.cat([*columns, self.norm(numbers)], 1))


class Crossed(DLRM):
    """DLRM-DCNv2: low-rank cross layers in place of products of pairs."""

    def __init__(self, layers: int = 3, rank: int = 128) -> None:
        super().__init__()
        width = 27 * 64
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.over = nn.ModuleList(nn.Linear(rank, width) for _ in range(layers))
        self.top = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))

    def interact(self, dense: Tensor, bags: list[Tensor]) -> Tensor:
        """dense [N, 13], bags [N, 64] each; returns [N, 1]."""
        x = first = torch.cat([self.bottom(dense), *bags], 1)
        for down, over in zip(self.down, self.over, strict=True):
            x = first * over(down(x)) + x
        result: Tensor = self.top(x).sigmoid()
        return result


class TwoTower(nn.Module):
    """A user's and an item's tower; bags with weights for each sample and a padding index; their cosine."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(_USERS, width, padding_idx=0), nn.Embedding(_ITEMS, width)
        self.seen = nn.EmbeddingBag(_ITEMS, width, mode="sum", padding_idx=0)
        self.words = nn.EmbeddingBag(_WORDS, width, mode="mean", padding_idx=0)
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width, 256), nn.ReLU(), nn.Linear(256, width)) for _ in range(2)
        )

    def forward(
        self, user: Tensor, seen: Tensor, shares: Tensor, item: Tensor, words: Tensor, offsets: Tensor
    ) -> Tensor:
        """user, item [N], seen and shares [N, 20], words [any number] between offsets [N]; returns [N]."""
        users = self.towers[0](torch.cat([self.user(user), self.seen(seen, per_sample_weights=shares)], 1))
        items = self.towers[1](torch.cat([self.item(item), self.words(words, offsets)], 1))
        return (F.normalize(users, dim=1) * F.normalize(items, dim=1)).sum(1)


def _clicks(batch: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 13), torch.randint(0, 100_000, (batch, 26, 10))


def _between_offsets(batch: int) -> tuple[Tensor, ...]:
    offsets = torch.cat([torch.zeros(26, 1), torch.randint(1, 20, (26, batch - 1)).cumsum(1)], 1).long()
    counts = [int(offsets[table, -1]) + 7 for table in range(26)]
    return torch.randn(batch, 13), offsets, *(torch.randint(0, 100_000, (count,)) for count in counts)


def _visits(batch: int) -> tuple[Tensor, ...]:
    seen = torch.randint(0, _ITEMS, (batch, 20))
    seen[:, 15:] = 0
    lengths = torch.randint(0, 12, (batch,))  # some bags are empty
    words = torch.randint(0, _WORDS, (int(lengths.sum()),))
    offsets = lengths.cumsum(0) - lengths
    return (
        torch.randint(0, _USERS, (batch,)),
        seen,
        torch.rand(batch, 20),
        torch.randint(0, _ITEMS, (batch,)),
        words,
        offsets,
    )


def _categories(batch: int) -> tuple[Tensor, ...]:
    columns = [torch.randint(0, 100 + 50 * column, (batch,)) for column in range(40)]
    return torch.stack(columns, 1), torch.randn(batch, 20)


def rows() -> list[Row]:
    """The rows."""
    return [
        Row(
            AUDIO,
            "demucs",
            "Demucs-like, 4 levels from 32 channels, 0.4 s of stereo",
            Demucs,
            lambda: (torch.randn(1, 2, 17748),),
            recurrent=True,
        ),
        Row(
            AUDIO,
            "keywords",
            "separable 1-D convolutions, 1 s of 64 mels",
            KeywordSpotter,
            lambda: (torch.randn(1, 64, 100),),
        ),
        Row(
            FIELDS,
            "nerf",
            "NeRF, 8 x 256, 1024 points",
            Nerf,
            lambda: (torch.randn(1024, 3), F.normalize(torch.randn(1024, 3), dim=1)),
        ),
        Row(
            GRAPHS,
            "graph",
            "3 rounds of messages of 128, 1000 nodes, 5000 edges",
            GraphNetwork,
            lambda: (torch.randn(1000, 32), torch.randint(0, 1000, (2, 5000))),
            "gathers and scattered sums are PyTorch's",
        ),
        Row(TABLES, "tabular", "40 embeddings and 20 numbers, batch 64", Tabular, lambda: _categories(64)),
        Row(RECOMMENDERS, "dlrm", "DLRM, 26 tables of 64, batch 128", DLRM, lambda: _clicks(128)),
        Row(
            RECOMMENDERS,
            "dlrm-offsets",
            "DLRM, bags between offsets, batch 128",
            OffsetsDLRM,
            lambda: _between_offsets(128),
        ),
        Row(
            RECOMMENDERS, "dcn", "DLRM-DCNv2-like, 3 cross layers of rank 128, batch 128", Crossed, lambda: _clicks(128)
        ),
        Row(
            RECOMMENDERS, "two-tower", "two towers, weighted and padded bags, batch 128", TwoTower, lambda: _visits(128)
        ),
    ]
