"""Sizes read in the midst of a graph become numbers, or sizes of its arguments, where an example decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.graph.graph import DTYPE, RANK
from fx_passes.trace.decisions import DECIDED, SIZES, Tied, decided
from tests.fx_passes.trace.test_decisions import optimized, same, serves


class Heads(nn.Module):
    """Attention whose sizes are those of what layers before it made."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.conv, self.qkv, self.heads = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 24), heads

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if y.shape[2] != 6:
            y = y.relu()
        y = y.flatten(2).transpose(1, 2)
        batch, length, width = y.shape
        places = torch.arange(length, dtype=y.dtype, device=y.device)
        q, k, v = (
            self.qkv(y).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        )
        scores = q @ k.transpose(-1, -2) - (places[:, None] - places[None]).abs()
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)


class Pieces(nn.Module):
    """What an operator makes is read as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 8, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.shape[2] > 100:
            y = y.relu()
        return self.last(torch.cat(torch.split(y, 4, dim=1), dim=0))


def tied(gm: Any) -> list[Any]:
    return [node.meta[DECIDED][SIZES] for node in decided(gm._source[0].graph) if SIZES in node.meta[DECIDED]]


def test_one_region() -> None:
    model = Heads()
    gm = optimized(model, torch.randn(2, 3, 12, 12))
    assert len(gm.regions()) == 1
    found = tied(gm)
    assert Tied("x", 0) in found and 8 in found and 36 in found
    for n in (1, 2, 5):
        x = torch.randn(n, 3, 12, 12)
        assert serves(gm, x)
        same(gm, model, x)
    for size in (8, 10, 16):
        same(gm, model, torch.randn(2, 3, size, size))
        same(gm, model, torch.randn(2, 3, size, 6))


def test_what_is_made_of_numbers_alone_is_made_once() -> None:
    gm = optimized(Heads(), torch.randn(2, 3, 12, 12))
    assert not gm._source[0].graph.find_nodes(op="call_function", target=torch.arange)


def test_ranks_and_dtypes_are_known() -> None:
    gm = optimized(Heads(), torch.randn(2, 3, 12, 12))
    known = {
        str(node.target): (node.meta[RANK], node.meta[DTYPE])
        for node in gm._source[0].graph.nodes
        if DTYPE in node.meta
    }
    assert known["conv"] == (4, torch.float32) and known["qkv"] == (3, torch.float32) and "x" in known
    assert not serves(gm, torch.randn(2, 3, 12, 12).double())


def test_sizes_as_a_whole() -> None:
    class Whole(Heads):
        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            if y.shape[3] != 6:
                y = y.relu()
            return y.new_ones(y.shape) + y.sum(1, keepdim=True).expand(y.shape) + y

    model = Whole()
    gm = optimized(model, torch.randn(2, 3, 12, 12))
    assert (Tied("x", 0), 8, 6, 6) in tied(gm)
    for n in (1, 2, 5):
        assert serves(gm, torch.randn(n, 3, 12, 12))
        same(gm, model, torch.randn(n, 3, 12, 12))


def test_pieces_read_as_a_whole() -> None:
    model = Pieces()
    gm = optimized(model, torch.randn(2, 8, 5, 3))
    assert len(gm.regions()) == 1
    for shape in ((2, 8, 5, 3), (3, 8, 7, 1), (1, 8, 1, 2)):
        assert serves(gm, torch.randn(shape))
        same(gm, model, torch.randn(shape))


def test_tied_sizes_that_are_others_after_all() -> None:
    """Square images: the height of the example is its width as well, and the answer depends on both."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            if y.shape[2] > 100:
                y = y.relu()
            return y.flatten(2).view(y.shape[0], 3, y.shape[3], -1)

    model = Square()
    gm = optimized(model, torch.randn(1, 3, 6, 6))
    for shape in ((1, 3, 6, 6), (2, 3, 6, 6), (1, 3, 6, 4), (1, 3, 4, 6), (3, 3, 5, 3), (6, 3, 6, 6)):
        for _ in range(2):
            same(gm, model, torch.randn(shape))
            assert gm(torch.randn(shape)).shape == model(torch.randn(shape)).shape


@pytest.mark.parametrize("batch", (1, 2, 4, 8))
def test_a_batch_that_is_also_another_size(batch: int) -> None:
    """A batch of as many as there are channels, or heads."""
    model = Heads()
    gm = optimized(model, torch.randn(batch, 3, 12, 12))
    for n in (1, 2, 3, 4, 8, 16):
        same(gm, model, torch.randn(n, 3, 12, 12))


class ReadByTwo(nn.Module):
    """The first reader of the batch reads another size, too: of those that read the batch it is the last one then."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if y.shape[3] != 6:
            y = y.relu()
        height, batch = y.size(2), y.size(0)
        y = y.flatten(2).reshape(batch, 8, height, -1)
        return y.permute(0, 2, 3, 1).reshape(batch, -1)


def test_sizes_are_told_before_all_that_read_them() -> None:
    model, x = ReadByTwo().eval(), torch.randn(2, 3, 12, 12)
    gm = zendnn_cffi.optimize(model, (x,), tune="off")
    assert len(gm.regions()) == 1
    torch.testing.assert_close(gm(x), model(x))
