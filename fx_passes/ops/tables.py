"""Rows and elements by index."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_passes.ops.quantized import Axis, dequantize
from fx_passes.ops.registry import COMPUTE, op
from zendnn_cffi.runtime.padded_bags import padded_bag


@op(kind=COMPUTE, light=True, opens_region=False, row_major=True)
def embedding(weight: Tensor, indices: Tensor) -> Tensor:
    """torch.embedding: rows of the table weight [R, D]; the result has the shape of indices, then D."""
    return torch.embedding(weight, indices)


@op(kind=COMPUTE, no_rule="outside, where PyTorch dequantizes the rows that are read alone")
def quantized_embedding(
    indices: Tensor, table: Tensor, scale: Tensor, zero_point: Tensor | None, axis: Axis, dtype: torch.dtype
) -> Tensor:
    """torch.embedding of what ops.dequantize makes of table [R, D], of which only rows that are read are dequantized.

    axis  0, or sizes (1, D or part of it) of blocks
    """
    places, (r, d) = indices.reshape(-1), table.shape
    blocks = axis if isinstance(axis, tuple) else (1, d)
    rows = torch.embedding(table, indices).view(-1, d)
    scales, zeros = (None if each is None else each.view(r, -1).index_select(0, places) for each in (scale, zero_point))
    return dequantize(rows, scales, zeros, blocks, dtype).view(*indices.shape, d)


@op(kind=COMPUTE, no_rule="one by itself stays outside, where PyTorch reads its indices in place")
def embedding_bag(
    indices: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    mode: str,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Tensor:
    """Return bags of rows of weight combined by mode "sum", "mean" or "max", as F.embedding_bag."""
    return padded_bag(indices, weight, offsets, mode, per_sample_weights, include_last_offset, padding_idx)


@op(kind=COMPUTE)
def embedding_bags(
    weights: Sequence[Tensor],
    indices: Tensor | Sequence[Tensor],
    mode: str,
    before: Sequence[Tensor] = (),
    after: Sequence[Tensor] = (),
) -> Tensor:
    """Return before, one bag of each table, then after, side by side along dimension 1.

    weights        [E_t, D] each; in mode "row" [E_t, D_t]
    indices        [N, L_t] each, or the first slices along dimension 1 of one tensor [N, T or more, L]
    mode           "sum", "mean", or "row": F.embedding, a row in place of a bag, by indices without the dimension L
    before, after  [N, *]
    """
    each = [indices[:, t] for t in range(len(weights))] if isinstance(indices, Tensor) else indices
    one = F.embedding if mode == "row" else partial(F.embedding_bag, mode=mode)
    bags = [one(i, w) for i, w in zip(each, weights, strict=True)]
    return torch.cat([*before, *bags, *after], 1)


@op(kind=COMPUTE, no_rule="outside, the number of indices may be another in each call")
def offset_bags(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Tensor | Sequence[Tensor],
    mode: str,
    include_last_offset: bool,
) -> Tensor:
    """Return bags between offsets [N, T, D], of each table those of its own indices, as F.embedding_bag.

    weights  T of [E_t, D]
    indices  T of [K_t]
    offsets  T of [N], or the first of one tensor [T or more, N] or list; with include_last_offset one more than N
    mode     "sum" or "mean"
    """
    bags = [
        F.embedding_bag(i, w, offsets[t], mode=mode, include_last_offset=include_last_offset)
        for t, (i, w) in enumerate(zip(indices, weights, strict=True))
    ]
    return torch.stack(bags, 1)


@op(kind=COMPUTE, light=True)
def concat_bags(bags: Tensor, before: Sequence[Tensor] = (), after: Sequence[Tensor] = ()) -> Tensor:
    """Return before, the bags [N, T, D] of each table, then after ([N, *]), side by side along dimension 1."""
    return torch.cat([*before, bags.flatten(1), *after], 1)


@op(kind=COMPUTE, light=True, opens_region=False, row_major=True)
def take_rows(src: Tensor, indices: Tensor) -> Tensor:
    """Return rows of src [..., C] by their number over all dimensions but the last: [*indices.shape, C]."""
    return torch.embedding(src.flatten(0, -2), indices)


@op(kind=COMPUTE)
def pick(src: Tensor, dim: int, indices: Sequence[Tensor]) -> Tensor:
    """Return src[:, ..., i, j, ...]: elements (i[k], j[k], ...) of the dimensions from dim on, index tensors [K]."""
    return src[(*(slice(None),) * dim, *indices)]
