"""What the steps of rows with scales of their own share: numbers of each row, passes of PyTorch, and blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, fx

from fx_passes.candidates.candidates import Argument, Operand, TorchTemplate
from fx_passes.candidates.layouts import row_major
from fx_passes.lower.context import LoweringContext

MANY_ROWS = 16  # of fewer a call of PyTorch costs more than it saves
CACHE_BYTES = 512 << 10  # of the second-level cache of each thread's core
SCALE, INVERSE, ZERO_POINT = range(3)  # along dimension 0 of what choose_row_scales returns: 2, or 3 numbers


def have_zero_points(chosen: fx.Node, context: LoweringContext) -> bool:
    """Whether rows that were chosen so have zero points."""
    return context.values.specs[chosen].shape[0] > ZERO_POINT


def of_rows(which: int, first: int, count: int, of: int) -> Operand:
    """One of the numbers of `count` rows from `first` on, as [count, 1]; operand 1 has those of `of` rows."""
    column = row_major((count, 1), torch.float32)
    return Operand(1, column, (which * of + first) * torch.float32.itemsize)


def equal_blocks(rows: int, columns: int) -> Iterator[int]:
    """The largest size of equal blocks whose float32 numbers fit the caches, where those of all rows do not."""
    row, most = columns * torch.float32.itemsize, CACHE_BYTES * torch.get_num_threads()
    if rows * row >= 2 * most:
        fits = most // row
        yield from [size for size in range(fits, fits // 3, -1) if rows % size == 0][:1]


def fit_a_cache(rows: int, columns: int) -> bool:
    """Whether a matrix of float32 fits the cache of one core."""
    return rows * columns * torch.float32.itemsize <= CACHE_BYTES


def torch_pass(compute: Callable[..., None], *args: Argument) -> TorchTemplate:
    """A pass of PyTorch over a matrix with the numbers of rows or columns; the last argument is written."""
    return TorchTemplate(compute, "", True, f"{torch.__version__} {compute.__name__}", args, assists=True)


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a * b."""
    torch.mul(a, b, out=out)


def multiply_and_add(summand: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a * b + summand."""
    torch.addcmul(summand, a, b, out=out)
