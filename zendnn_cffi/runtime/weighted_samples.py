"""Weighted sums of bilinear samples of feature maps, as deformable attention takes them, by PyTorch's kernel for bags.

A sample is the sum of four pixels, times how near they are. So a query's sum over the samples of a map is that of four
bags, one for each corner: rows of D numbers, read where the map lies. Rows and weights are computed in blocks that stay
in the caches. F.grid_sample writes all samples [N, D, Q, P] first, and reads each of a pixel's D numbers by itself.

Both pixels of an axis are always in the map: those nearest to the sample. A pixel counts as much as it is nearer than
one pixel, so beyond the border one of the two counts, and further away none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from zendnn_cffi.values import dataclass

_BLOCK = 1 << 15  # samples computed together: 1.5 MB of numbers, and PyTorch's functions take two threads for them
MOST_ROWS = 1 << 24  # of a map: their numbers are computed in float32


@dataclass(frozen=True)
class Level:
    """One map [N, D, height, width], D numbers side by side, and how many samples of it a query has.

    steps  rows of D numbers from one of N to the next, from line to line, from pixel to pixel
    """

    height: int
    width: int
    points: int
    steps: tuple[int, int, int]


class WeightedSamples:
    """function(*maps, *grids, weights, scratch, out): sums into out [N, D, Q]; all float32.

    maps [N, D, h, w] and grids [N, Q, P, 2], one of each level, as F.grid_sample takes them, weights [N, 1, Q, K], K of
    all P; scratch [self.scratch_numbers] is written.
    """

    def __init__(self, levels: Sequence[Level], shape: tuple[int, int, int], align_corners: bool) -> None:
        self.shape, self.align_corners = shape, align_corners
        samples, _, queries = shape
        most = max(level.points for level in levels)
        self._queries = max(1, min(queries, _BLOCK // most))
        self._samples = max(1, min(samples, _BLOCK // (most * queries)))
        self.scratch_numbers = 12 * most * self._queries * self._samples
        self._parts = [_Part(level, shape, self._queries * self._samples, align_corners) for level in levels]

    def __call__(self, *tensors: Tensor) -> None:
        count = len(self._parts)
        maps, grids, (weights, scratch, out) = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
        samples, _, queries = self.shape
        by_query, seen = out.transpose(1, 2), torch.zeros((), dtype=torch.float32, device="cpu")
        for n in range(0, samples, self._samples):
            for q in range(0, queries, self._queries):
                place = slice(n, n + self._samples), slice(q, q + self._queries)
                sums, first = by_query[place], 0
                for part, level, grid in zip(self._parts, maps, grids, strict=True):
                    share = weights[place[0], 0, place[1], first : first + part.points]
                    corners, places = part.sums(level, grid[place], share, n, scratch)
                    sums.add_(corners.sum(0)) if first else torch.sum(corners, 0, out=sums)
                    seen += places
                    first += part.points
        if not math.isfinite((seen + out.sum()).item()):  # 0 times infinity is no 0
            out.copy_(samples_by_pytorch(maps, grids, weights, self.align_corners))


def samples_by_pytorch(maps: Sequence[Tensor], grids: Sequence[Tensor], weights: Tensor, align_corners: bool) -> Tensor:
    """The same [N, D, Q] as models write it."""
    samples = [
        F.grid_sample(level, grid, "bilinear", "zeros", align_corners) for level, grid in zip(maps, grids, strict=True)
    ]
    return (torch.cat(samples, -1) * weights).sum(-1)


class _Part:
    """What the sums over one level's samples need that is the same in each call."""

    def __init__(self, level: Level, shape: tuple[int, int, int], bags: int, align_corners: bool) -> None:
        def of_axes(x: float, y: float) -> Tensor:
            return torch.tensor([x, y], dtype=torch.float32, device="cpu").view(2, 1, 1, 1)

        samples, width, _ = shape
        step, line, pixel = level.steps
        self.points = level.points
        sizes = of_axes(level.width, level.height)
        self._shift, self._scale = (sizes - 1) / 2, ((sizes - 1) if align_corners else sizes) / 2
        self._last, self._steps = sizes - 2, of_axes(pixel, line)
        self._first = (torch.arange(samples, dtype=torch.float32, device="cpu") * step).view(-1, 1, 1)
        corners = [0, pixel, line, line + pixel]
        self._corners = torch.tensor(corners, dtype=torch.int32, device="cpu").view(4, 1, 1, 1)
        rows = (samples - 1) * step + (level.height - 1) * line + (level.width - 1) * pixel + 1
        self._table, self._last_row = (rows, width), rows - 1 - line - pixel
        self._begins = torch.arange(4 * bags, dtype=torch.int32, device="cpu") * level.points
        self._one = torch.ones((), dtype=torch.float32, device="cpu")

    def sums(self, level: Tensor, grid: Tensor, weights: Tensor, n: int, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """[4, n, q, D] of a part of the samples, from number n on, and of the queries: of each corner; a number that is
        finite where all places are.
        """
        shape = tuple(weights.shape)
        size = math.prod(shape)
        at, low, sides, scales = (
            part.view(-1, *shape) for part in scratch[: 12 * size].split([2 * size, 2 * size, 4 * size, 4 * size])
        )
        torch.addcmul(self._shift, grid.permute(3, 0, 1, 2), self._scale, out=at)
        torch.floor(at, out=low).clamp_min_(0)
        torch.minimum(low, self._last, out=low)
        torch.sub(at, low, out=sides[:2])
        torch.sub(sides[:2], self._one, out=sides[2:])
        torch.sub(self._one, sides.abs_(), out=sides).clamp_min_(0)  # of x and y: the lower pixel, the higher one
        x, y = sides[0::2], sides[1::2]
        y.mul_(weights)
        torch.mul(y.unsqueeze(1), x.unsqueeze(0), out=scales.view(2, 2, *shape))
        places = at.sum()
        row = low.mul_(self._steps)[1].add_(low[0]).add_(self._first[n : n + shape[0]])
        rows = at[0].view(torch.int32).copy_(row).clamp_(0, self._last_row)  # whatever it is of what is no number
        indices = sides.view(torch.int32)
        torch.add(rows, self._corners, out=indices)
        table, begins = level.as_strided(self._table, (self._table[1], 1)), self._begins[: 4 * shape[0] * shape[1]]
        bags = torch._embedding_bag_forward_only(
            table, indices.view(-1), begins, False, 0, False, scales.view(-1), False
        )[0]
        return bags.view(4, *shape[:2], -1), places
