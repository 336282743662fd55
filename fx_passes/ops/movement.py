"""Moving data: the result may be a view in eager and plain torch; within a region only the values count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_passes.ops.registry import COMPUTE, MOVEMENT, op


@op(kind=COMPUTE, light=True, shares_memory=True, torch_candidate=True)
def concat(srcs: Sequence[Tensor], dim: int) -> Tensor:
    """Return the concatenation of srcs along dim."""
    return torch.cat(list(srcs), dim)


@op(kind=COMPUTE, shape="same", light=True, opens_region=False, torch_candidate=True)
def roll(src: Tensor, shifts: Sequence[int], dims: Sequence[int]) -> Tensor:
    """Return src with its elements moved along dims by shifts; what leaves at one end comes in at the other."""
    return torch.roll(src, tuple(shifts), tuple(dims))


@op(kind=MOVEMENT, per_sample=True, view=True, sizes_at=1)
def reshape(src: Tensor, shape: Sequence[int]) -> Tensor:
    """Return src with another shape of as many elements (-1: whatever is left)."""
    return src.reshape(tuple(shape))


@op(kind=MOVEMENT, view=True)
def reshape_as(src: Tensor, like: Tensor) -> Tensor:
    """Return src with the shape of like, whose numbers do not count."""
    return src.reshape(like.shape)


@op(kind=MOVEMENT, view=True)
def flatten(src: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Return src with the dimensions from start_dim to end_dim (included) made one."""
    return torch.flatten(src, start_dim, end_dim)


@op(kind=MOVEMENT, view=True, sizes_at=2)
def unflatten(src: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return src with one dimension made several, of these sizes (-1: whatever is left)."""
    return src.unflatten(dim, tuple(sizes))


@op(kind=MOVEMENT, view=True)
def permute(src: Tensor, dims: Sequence[int]) -> Tensor:
    """Return src with its dimensions in the order dims."""
    return src.permute(tuple(dims))


@op(kind=MOVEMENT, view=True, shape="rank")
def transpose(src: Tensor, dim0: int, dim1: int) -> Tensor:
    """Return src with two dimensions exchanged (permute, where the rank is not known)."""
    return src.transpose(dim0, dim1)


@op(kind=MOVEMENT, shares_memory=True, several=True, no_rule="its pieces are read by operator.getitem")
def chunk(src: Tensor, chunks: int, dim: int) -> tuple[Tensor, ...]:
    """Return src in at most `chunks` pieces along dim; read through operator.getitem."""
    return torch.chunk(src, chunks, dim)


@op(kind=MOVEMENT, shares_memory=True, several=True, no_rule="its pieces are read by operator.getitem")
def split(src: Tensor, size: int | Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """Return src in pieces of `size` (or of the sizes listed) along dim; read through operator.getitem."""
    return torch.split(src, size, dim)


@op(kind=MOVEMENT, shares_memory=True, several=True, no_rule="its pieces are read by operator.getitem")
def split_at(src: Tensor, indices: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """Return src cut before each of the indices along dim, with slice semantics; read through operator.getitem."""
    return torch.tensor_split(src, tuple(indices), dim)


# Operations that cut a tensor into pieces along `dim`.
PIECES = (chunk, split, split_at)


@op(kind=MOVEMENT, view=True, shape="rank")
def narrow(src: Tensor, dim: int, start: int | None, stop: int | None) -> Tensor:
    """Return src[start:stop] along dim, with slice semantics (negative and out-of-range bounds)."""
    return torch.ops.aten.slice.Tensor(src, dim, start, stop)


@op(kind=MOVEMENT, view=True, sizes_at=1)
def index(src: Tensor, item: Any) -> Tensor:
    """Return src[item]: numbers, slices, None and ... only, so a view."""
    return src[item]


@op(kind=MOVEMENT, view=True)
def unsqueeze(src: Tensor, dim: int) -> Tensor:
    """Return src with a dimension of size 1 inserted."""
    return src.unsqueeze(dim)


@op(kind=MOVEMENT, shares_memory=True, sizes_at=1)
def expand(src: Tensor, shape: Sequence[int]) -> Tensor:
    """Return src with dimensions of size 1 repeated to shape (-1: as it is)."""
    return src.expand(tuple(shape))


@op(kind=MOVEMENT, per_sample=True, view=True, shape="same", row_major=True)
def contiguous(src: Tensor) -> Tensor:
    """Return src in row-major order; where only values count, nothing."""
    return src.contiguous()


@op(kind=MOVEMENT, shape="rank", sizes_at=1, no_rule="borders are written by PyTorch")
def pad(src: Tensor, padding: Sequence[int], value: float = 0.0) -> Tensor:
    """Return src with constant borders; padding as F.pad's, last dimension first."""
    return F.pad(src, list(padding), "constant", value)
