"""Concatenations of quantized values that begin with an earlier one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fx_passes import ops
from fx_passes.fuse.concatenations import chain_concatenations
from tests.support.graphs import after, check_twice
from tests.support.lowering import noise
from tests.support.quantized import Integers, Weight, kept, optimized, ran, real, reorders

SCALE, ZERO = 0.02, 100


def dense_block(w: Any, x: Tensor) -> Tensor:
    """Each layer reads all before it, each reader its own dequantized value."""
    kept_pieces = [kept(x, SCALE, ZERO)]
    for layer in w:
        together = torch.cat([real(piece, SCALE, ZERO) for piece in kept_pieces], 1)
        y = torch.nn.functional.conv2d(real(kept(together, SCALE, ZERO), SCALE, ZERO), layer(), layer.bias, padding=1)
        kept_pieces.append(kept(y, SCALE, ZERO))
    return kept(torch.cat([real(piece, SCALE, ZERO) for piece in kept_pieces], 1), SCALE, ZERO)


def concatenations(gm: Any) -> list[int]:
    """How many pieces each has."""
    return [len(node.args[0]) for node in gm.graph.nodes if node.target is ops.concat]


def block(layers: int) -> Integers:
    return Integers(dense_block, *(Weight(8, 8 * (i + 1), 3, 3, seed=i) for i in range(layers)))


def test_each_begins_with_the_last_one() -> None:
    gm = after("chain_concatenations", block(4))
    assert concatenations(gm) == [2, 2, 2, 2]
    check_twice(gm, chain_concatenations)


@pytest.mark.needs("vnni")
def test_the_numbers_are_those_of_the_whole() -> None:
    fast = optimized(block(4), noise(1, 8, 9, 7), steps=4.0)
    assert [kind for kind, _, _ in ran(fast)] == ["convolution"] * 4
    copies = [pair for pair in reorders(fast) if pair in ((torch.uint8,) * 2, (torch.int32,) * 2)]  # words of integers
    assert len(copies) == 8  # 2 + 3 + 4 + 5 pieces, had each been copied by itself


def test_other_scales_orders_and_dimensions_stay() -> None:
    def forward(w: Any, x: Tensor) -> Any:
        a, b, c = (kept(x * factor, SCALE, ZERO) for factor in (1.0, 0.5, 0.25))
        pieces = [real(a, SCALE, ZERO), real(b, SCALE, ZERO)]
        return (
            torch.cat(pieces, 1),
            torch.cat([*reversed(pieces), real(c, SCALE, ZERO)], 1),
            torch.cat([*pieces, real(c, SCALE, ZERO)], 2),
            torch.cat([pieces[0], real(b, 2 * SCALE, ZERO), real(c, SCALE, ZERO)], 1),
        )

    assert concatenations(after("chain_concatenations", Integers(forward))) == [2, 3, 3, 3]


def test_float32_stays() -> None:
    def forward(w: Any, a: Tensor) -> Any:
        b = torch.tanh(a)
        return torch.cat([a, b], 1), torch.cat([a, b, a], 1)

    assert concatenations(after("chain_concatenations", Integers(forward))) == [2, 3]
