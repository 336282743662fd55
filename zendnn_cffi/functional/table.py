"""embedding_bag: sums, means or maxima of table rows, with every index checked before the library sees it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from zendnn_cffi.functional._arrays import FLOATS
from zendnn_cffi.functional._call import Call
from zendnn_cffi.functional._kernel import Kernel
from zendnn_cffi.functional._operation import operation
from zendnn_cffi.primitives import allocation, checks, descriptors
from zendnn_cffi.primitives.attributes import ARG_SRC, ARG_SRC_1, ARG_SRC_2, ARG_SRC_3, Attr, kind_value
from zendnn_cffi.primitives.known_problems import MAX_WIDTHS
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc

_CHUNK = 128
_INDEX_TYPES = (torch.int32, torch.int64)


@operation
def embedding_bag(
    table: Any,
    indices: Any,
    offsets: Any = None,
    kind: str = "sum",
    *,
    weights: Any = None,
    padding_idx: int | None = None,
    include_last_offset: bool = False,
    out: Any = None,
) -> Any:
    """Return one row per bag of table rows, as torch.nn.functional.embedding_bag.

    table    [E, D] float32 or bfloat16
    indices  [L] with offsets, or [B, L] without; int32 or int64, each from 0 to E - 1
    offsets  [B] int32 or int64: where each bag starts in indices; first 0, never falling, none past L
    kind     "sum", "mean" or "max"; empty bags give zeros, as in torch
    weights  float32, shape of indices, or None; only with kind "sum"
    padding_idx  rows with this index count for nothing (None: all count); negative ones count from the end
    include_last_offset  whether offsets has a final entry that only ends the last bag
    Returns  [B, D], dtype of table
    Raises   IndexError for an index out of range; TypeError, ValueError for other arguments that do not fit
    """
    call = Call()
    kind_value(descriptors.EMBEDDING_BAG, kind, "kind")
    rows = call.take(table, "table", FLOATS)
    if rows.dim() != 2:
        raise ValueError(f"table must be [E, D], got shape {list(rows.shape)}")
    index = call.take(indices, "indices", _INDEX_TYPES)
    starts = _bags(call, index, offsets, checks.as_bool(include_last_offset, "include_last_offset"))
    padding = (
        -1
        if padding_idx is None
        else checks.as_int(padding_idx, "padding_idx", minimum=-rows.shape[0], maximum=rows.shape[0] - 1)
        % rows.shape[0]
    )
    sample = None
    if weights is not None:
        if kind != "sum":
            raise ValueError(f"weights go with kind 'sum' only, got kind {kind!r}")
        sample = call.take(weights, "weights", (torch.float32,))
        if sample.shape != index.shape:
            raise ValueError(f"weights must have the shape of indices, {list(index.shape)}, got {list(sample.shape)}")
        sample = sample.reshape(-1).contiguous()
    flat = index.reshape(-1)
    _check_range(flat, rows.shape[0])
    bags = starts.numel()
    source = rows.contiguous()
    call.add(ARG_SRC, source)
    result = call.output(out, (bags, rows.shape[1]), rows.dtype)
    if result.numel() == 0:
        return call.result()
    if not result.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {list(result.stride())}")
    empty = _empty_bags(flat, starts, padding)
    if flat.numel() == 0 or bool(empty.all()):
        result.zero_()
        return call.result()
    if kind == "max" and (padding >= 0 or rows.shape[1] not in MAX_WIDTHS):
        _max_by_chunks(source, flat, starts, padding, result)
        return call.result()
    call.add(ARG_SRC_1, flat.to(torch.int32).contiguous())
    call.add(ARG_SRC_2, starts.to(torch.int32).contiguous())
    if sample is not None:
        call.add(ARG_SRC_3, sample)
    threads = torch.get_num_threads()

    def build(layouts: dict[int, MemoryDesc], attr: Attr) -> Kernel:
        op = descriptors.embedding_bag(
            kind,
            layouts[ARG_SRC],
            layouts[ARG_SRC_1],
            layouts[ARG_SRC_2],
            layouts.get(ARG_SRC_3),
            MemoryDesc(result.shape, rows.dtype),
            padding_idx=padding,
            num_threads=threads,
        )
        return Kernel(PrimitiveDesc(op, attr), layouts)

    call.run(("embedding_bag", kind, padding), build)
    if bool(empty.any()):  # the library leaves these rows undefined
        result[empty] = 0
    return call.result()


def _max_by_chunks(
    source: torch.Tensor, flat: torch.Tensor, starts: torch.Tensor, padding: int, result: torch.Tensor
) -> None:
    """Fill result with maxima of rows of any width, from pieces of a width that the library takes rightly."""
    kept = flat != padding
    before = torch.cat([allocation.numbers([0], torch.int64), kept.cumsum(0)])
    used, starts = source[flat[kept].long()], before[starts]
    width = next((w for w in MAX_WIDTHS if w >= source.shape[1] and w <= _CHUNK), _CHUNK)
    places = torch.arange(used.shape[0], device="cpu")
    for first in range(0, source.shape[1], width):
        piece = used[:, first : first + width]
        table = allocation.filled((piece.shape[0], width), 0, source.dtype)
        table[:, : piece.shape[1]] = piece
        result[:, first : first + width] = embedding_bag(table, places, starts, "max")[:, : piece.shape[1]]


def _bags(call: Call, index: torch.Tensor, offsets: Any, include_last: bool) -> torch.Tensor:
    """Return where each bag starts, int64, checked."""
    if index.dim() == 2:
        if offsets is not None:
            raise ValueError("offsets go with indices of one dimension; two-dimensional indices are one bag per row")
        return torch.arange(index.shape[0], device="cpu") * index.shape[1]
    if index.dim() != 1:
        raise ValueError(f"indices must have 1 or 2 dimensions, got shape {list(index.shape)}")
    if offsets is None:
        raise ValueError("indices of one dimension need offsets, where each bag starts")
    starts = call.take(offsets, "offsets", _INDEX_TYPES).to(torch.int64)
    if starts.dim() != 1 or starts.numel() == 0 and include_last:
        raise ValueError(f"offsets must have 1 dimension, got shape {list(starts.shape)}")
    if starts.numel():
        steps = starts[1:] - starts[:-1]
        if starts[0] != 0 or bool((steps < 0).any()) or starts[-1] > index.numel():
            raise ValueError(
                f"offsets must start at 0, never fall, and end at most at {index.numel()}, the number of indices"
            )
        if include_last and starts[-1] != index.numel():
            raise ValueError(
                f"the last offset must be {index.numel()}, the number of indices, with include_last_offset; got "
                f"{int(starts[-1])}"
            )
    return starts[:-1] if include_last else starts


def _check_range(flat: torch.Tensor, count: int) -> None:
    if flat.numel() == 0:
        return
    if flat.numel() >= 2**31 or count >= 2**31:
        raise ValueError("the library counts rows and indices in 32 bits: there are too many")
    low, high = int(flat.min()), int(flat.max())
    if low < 0 or high >= count:
        raise IndexError(f"indices reach from {low} to {high}, the table has rows 0 to {count - 1}")


def _empty_bags(flat: torch.Tensor, starts: torch.Tensor, padding: int) -> torch.Tensor:
    """Return per bag whether nothing in it counts."""
    ends = torch.cat([starts[1:], allocation.numbers([flat.numel()], torch.int64)])
    if padding < 0:
        return starts == ends
    counted = np.concatenate([[0], np.cumsum((flat != padding).numpy())])
    return torch.from_numpy(counted[ends.numpy()] == counted[starts.numpy()])
