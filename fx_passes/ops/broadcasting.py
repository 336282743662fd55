"""Operands that broadcast in the last dimensions, written out so far that PyTorch's loops are long.

    [1, 630, 8, 3, 4, 2] / [1, 1, 1, 3, 1, 2]

PyTorch's inner loop goes over two numbers here, and takes 270 us (2 threads of a Zen 4 core). Over the 24 numbers of
[1, 1, 1, 3, 4, 2] it takes 14.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_LEAST = 1 << 14  # numbers of the result: of fewer, the loops take less than looking
_SHORT, _LONG = 16, 64  # numbers of an inner loop
_TIMES = 4  # as long as it was, a loop is worth it
_SHARE = 4  # of the result, at most one in so many numbers are written out
_PLAIN = (Tensor, Parameter)


def in_long_runs(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both with the one that broadcasts written out along the last dimensions, where that pays; same numbers."""
    if a.numel() < b.numel():
        b, a = in_long_runs(b, a)
        return a, b
    shape = tuple(a.shape)
    if len(shape) < b.ndim or a.numel() < _LEAST or not a.is_contiguous():
        return a, b
    own = (1,) * (len(shape) - b.ndim) + tuple(b.shape)
    if any(size not in (1, whole) for size, whole in zip(own, shape, strict=True)) or _inner(own, shape) >= _SHORT:
        return a, b
    wanted, most = own, a.numel() // _SHARE
    for dim in reversed(range(len(shape))):
        further = own[:dim] + shape[dim:]
        if math.prod(shape[dim + 1 :]) >= _LONG or math.prod(further) > most:
            break
        wanted = further
    pays = _inner(wanted, shape) >= _TIMES * _inner(own, shape)
    return (a, b.expand(wanted).contiguous()) if pays else (a, b)


def is_plain(a: Any, b: Any) -> bool:
    """Whether both are dense tensors of PyTorch's own, of different shapes: those of tracers are not looked at."""
    if type(a) not in _PLAIN or type(b) not in _PLAIN or a.shape == b.shape:
        return False
    return a.layout is torch.strided and b.layout is torch.strided


def _inner(own: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """How long the inner loop is: over last dimensions that all broadcast, or all do not."""
    count, kinds = 1, set[bool]()
    for size, whole in zip(reversed(own), reversed(shape), strict=True):
        if whole > 1:
            kinds.add(size == 1)
        if len(kinds) > 1:
            break
        count *= whole
    return count
