"""Weights of 4 bits as PyTorch packs them for its kernels on CPUs: two integers in each byte.

An integer q of 0 to 15 stands for (q - 8) * scale + zero. A group of inputs has one of both for each output.
How outputs lie beside each other depends on the vectors that PyTorch packed for (get_cpu_capability):

    block 64 (AVX512), 32 (AVX2)    [N / block, K, block / 2]: byte i has output i and, above it, i + block / 2
    what is left of N, and block 0  as many outputs as there are, at most 32: byte i has outputs 2 i and 2 i + 1
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten

_BLOCKS = {"AVX512": 64, "AVX2": 32}
_PAIRED = 32  # outputs of a block where PyTorch has no vectors
SMALLEST = 16  # PyTorch packs multiples of these outputs


@functools.cache
def block_here() -> int:
    """The block of weights that this process packs, and that its kernel reads; it is settled when PyTorch is loaded."""
    return _BLOCKS.get(torch.backends.cpu.get_cpu_capability(), 0)


class Piece(NamedTuple):
    """Outputs first to last that lie together: in halves of a block, or in pairs."""

    first: int
    last: int
    in_halves: bool


def pieces(outputs: int, block: int) -> Iterator[Piece]:
    """What packed weights of so many outputs consist of, in their order."""
    size = block or _PAIRED
    for first in range(0, outputs, size):
        last = min(first + size, outputs)
        yield Piece(first, last, last - first == block)


def integers(packed: Tensor, block: int, out: Tensor) -> Tensor:
    """Write q - 8 of packed outputs to out [K, N] of any dtype, and return it."""
    n, k = packed.shape[0], 2 * packed.shape[1]
    flat, eight = packed.view(-1), torch.full((), 0x88, dtype=torch.uint8, device="cpu")
    found = list(pieces(n, block))
    halves = sum(piece.in_halves for piece in found)
    if halves:
        both = flat[: halves * block * k // 2].view(halves, k, block // 2)
        seen = out[:, : halves * block].unflatten(1, (halves, 2, block // 2)).transpose(0, 1)
        _split(both, eight, seen[:, :, 0], seen[:, :, 1])
    for piece in found[halves:]:
        both = flat[piece.first * k // 2 : piece.last * k // 2].view(k, -1)
        seen = out[:, piece.first : piece.last].unflatten(1, (-1, 2))
        _split(both, eight, seen[..., 0], seen[..., 1])
    return out


def _split(both: Tensor, eight: Tensor, low: Tensor, high: Tensor) -> None:
    """The two integers of each byte, counted from 8: a shift of int8 keeps the sign."""
    # A number in the place of `eight` would take 30 times as long.
    signed = torch.bitwise_xor(both, eight.expand_as(both)).view(torch.int8)
    high.copy_(signed >> 4)
    low.copy_(signed.bitwise_left_shift_(4).bitwise_right_shift_(4))


def dequantized(packed: Tensor, scales: Tensor, group: int, block: int, out: Tensor) -> Tensor:
    """Write the weights to out [K, N], rounded once to its dtype, which scales has, too; return it."""
    factor, zero = (scales[:, None, :, which].contiguous() for which in (0, 1))
    by_groups = integers(packed, block, out).view(-1, group, out.shape[1])
    torch.addcmul(zero, by_groups, factor, out=by_groups)
    return out


def packed_again(packed: Tensor, block: int) -> Tensor:
    """The same weights as this process's kernel reads them."""
    n, k = packed.shape[0], 2 * packed.shape[1]
    counted = integers(packed, block, torch.empty(k, n, dtype=torch.int32, device="cpu"))
    again: Tensor = aten._convert_weight_to_int4pack_for_cpu(counted.add_(8).t().contiguous(), 1)
    return again
