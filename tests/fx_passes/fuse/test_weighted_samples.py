"""Deformable attention's samples, as models write them, and what only looks like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi.backend
from fx_passes.pipeline import compile_graph
from tests.support.graphs import check_equal, count
from tests.support.lowering import noise

HEADS, WIDTH, POINTS = 2, 4, 3
SIZES = (5, 4), (3, 2)
Written = Callable[..., Tensor]


class Deformable(nn.Module):
    """Deformable attention without its linear layers; `write` makes the sum of maps, grids and weights."""

    def __init__(self, write: Written) -> None:
        super().__init__()
        self.write = write
        self.eval()

    def forward(self, value: Tensor, at: Tensor, weights: Tensor) -> Any:
        batch, queries = at.shape[:2]
        maps, grids = [], []
        for level, (height, width) in enumerate(SIZES):
            begin = sum(h * w for h, w in SIZES[:level])
            part = value[:, begin : begin + height * width].flatten(2).transpose(1, 2)
            maps.append(part.reshape(batch * HEADS, WIDTH, height, width))
            grids.append((2 * at - 1)[:, :, :, level].transpose(1, 2).flatten(0, 1))
        shares = weights.transpose(1, 2).reshape(batch * HEADS, 1, queries, len(SIZES) * POINTS)
        sums = self.write(maps, grids, shares)
        return sums.reshape(batch, HEADS * WIDTH, -1).transpose(1, 2)


def inputs(batch: int = 2, queries: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    rows = sum(h * w for h, w in SIZES)
    at = noise(batch, queries, HEADS, len(SIZES), POINTS, 2, seed=1) / 2 + 0.5
    return noise(batch, rows, HEADS, WIDTH), at, noise(batch, queries, HEADS, len(SIZES), POINTS, seed=2)


def sampled(maps: list[Tensor], grids: list[Tensor], **options: Any) -> list[Tensor]:
    options = {"mode": "bilinear", "padding_mode": "zeros", "align_corners": False, **options}
    return [F.grid_sample(level, grid, **options) for level, grid in zip(maps, grids, strict=True)]


def stacked(maps: list[Tensor], grids: list[Tensor], weights: Tensor, **options: Any) -> Tensor:
    """Deformable DETR's."""
    return (torch.stack(sampled(maps, grids, **options), dim=-2).flatten(-2) * weights).sum(-1)


def joined(maps: list[Tensor], grids: list[Tensor], weights: Tensor) -> Tensor:
    """RT-DETR v2's, whose levels may have any number of points each."""
    return (torch.concat(sampled(maps, grids), dim=-1) * weights).sum(-1)


def by_defaults(maps: list[Tensor], grids: list[Tensor], weights: Tensor) -> Tensor:
    samples = [F.grid_sample(level, grid, align_corners=True) for level, grid in zip(maps, grids, strict=True)]
    return (weights * torch.stack(samples, 3).flatten(3, 4)).sum(-1)


def found(write: Written, *given: Tensor) -> tuple[int, int]:
    """(operations of the new kind, calls of grid_sample) in its graph, which is right."""
    model, given = Deformable(write), given or inputs()
    gm = compile_graph(model, given)
    check_equal(model, gm, *given)
    names = [str(node.target) for node in gm.graph.nodes] + [str(n.target) for n in model_nodes(gm)]
    return count(gm)["weighted_samples"], sum("grid_sampl" in name for name in names)


def model_nodes(gm: Any) -> list[Any]:
    return [node for region in gm.regions().values() for node in region.graph.nodes]


@pytest.mark.parametrize("write", [stacked, joined, by_defaults])
def test_as_models_write_them(write: Written) -> None:
    assert found(write) == (1, 0)


def test_by_torch_compile() -> None:
    torch._dynamo.reset()
    model, given = Deformable(stacked), inputs()
    fast = torch.compile(model, backend="zendnn", options={"tune": "off"})
    with torch.no_grad():
        torch.testing.assert_close(fast(*given), model(*given))
    gm = zendnn_cffi.backend.compiled_modules()[-1]
    assert not [node for node in gm.graph.nodes if "grid_sampl" in str(node.target)]
    assert "weighted_samples" in [node.name for node in zendnn_cffi.explain(gm).nodes]


NEAR_MISSES: dict[str, Written] = {
    "nearest": lambda m, g, w: stacked(m, g, w, mode="nearest"),
    "borders repeated": lambda m, g, w: stacked(m, g, w, padding_mode="border"),
    "another dimension summed": lambda m, g, w: (torch.concat(sampled(m, g), -1) * w).sum(-2),
    "kept dimension": lambda m, g, w: (torch.concat(sampled(m, g), -1) * w).sum(-1, keepdim=True),
    "a mean": lambda m, g, w: (torch.concat(sampled(m, g), -1) * w).mean(-1),
    "added": lambda m, g, w: (torch.concat(sampled(m, g), -1) + w).sum(-1),
    "stacked elsewhere": lambda m, g, w: (torch.stack(sampled(m, g), -1).flatten(-2) * w).sum(-1),
    "not of samples": lambda m, g, w: (torch.concat([sampled(m, g)[0], sampled(m, g)[1].abs()], -1) * w).sum(-1),
    "unequal corners": lambda m, g, w: (
        torch.concat([*sampled(m[:1], g[:1]), *sampled(m[1:], g[1:], align_corners=True)], -1) * w
    ).sum(-1),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name: str) -> None:
    operations, samples = found(NEAR_MISSES[name])
    assert operations == 0 and samples >= 1


def test_samples_that_are_read_elsewhere_stay() -> None:
    def write(maps: list[Tensor], grids: list[Tensor], weights: Tensor) -> Tensor:
        samples = sampled(maps, grids)
        return (torch.concat(samples, -1) * weights).sum(-1) + samples[0].sum(-1)

    operations, samples = found(write)
    assert operations == 0 and samples


def test_grids_that_are_written_to_afterwards_stay() -> None:
    def write(maps: list[Tensor], grids: list[Tensor], weights: Tensor) -> Tensor:
        samples = sampled(maps, grids)
        own = grids[0].view(-1)
        own.view(-1, 2)[:, 0] = 7.0
        return (torch.concat(samples, -1) * weights).sum(-1) + own.sum()

    assert found(write)[0] == 0
