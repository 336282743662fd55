"""Boxes of tensors, copied into memory of their own or from it, by the library's reorder."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from fx_passes.candidates.layouts import has_bf16_kernels, strided
from zendnn_cffi.errors import ZenDNNError
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc

_WORD = torch.int32  # copied without a look at its bits


def box_reorder(
    whole: MemoryDesc, piece: MemoryDesc, offsets: Sequence[int], *, into: bool = False
) -> PrimitiveDesc | None:
    """The reorder from the box of `whole` that begins at offsets to `piece`, which has its sizes, or back.

    into     from the piece to its box
    Returns  None where blocks would have to be cut
    """
    whole, piece, offsets = _in_bytes(*_in_words(whole, piece, offsets))
    try:
        box = whole.submemory(piece.dims, offsets)
        return PrimitiveDesc.reorder(piece, box) if into else PrimitiveDesc.reorder(box, piece)
    except (ZenDNNError, ValueError):
        return None


def roll_reorders(layout: MemoryDesc, shifts: Sequence[int]) -> list[PrimitiveDesc]:
    """The reorders that copy a value to one of the same layout, moved along each dimension; together they write all.

    Returns  none where blocks would have to be cut
    """
    layout, _, shifts = _in_bytes(*_in_words(layout, layout, shifts))
    parts = [_rolled(size, shift) for size, shift in zip(layout.dims, shifts, strict=True)]
    found = []
    try:
        for box in itertools.product(*parts):
            begins, ends, sizes = zip(*box, strict=True)
            found.append(PrimitiveDesc.reorder(layout.submemory(sizes, begins), layout.submemory(sizes, ends)))
    except (ZenDNNError, ValueError):
        return []
    return found


def _rolled(size: int, shift: int) -> list[tuple[int, int, int]]:
    """(where it is, where it goes, its size) for each part of a dimension."""
    shift %= size
    return [(0, shift, size - shift), *([(size - shift, 0, shift)] if shift else [])]


def _in_words(
    whole: MemoryDesc, piece: MemoryDesc, offsets: Sequence[int]
) -> tuple[MemoryDesc, MemoryDesc, Sequence[int]]:
    """Both, and where the box begins, in words of four bytes where narrower numbers lie in whole words.

    The library's kernel takes half the time for words that it takes for their bytes.
    """
    count = _WORD.itemsize // whole.dtype.itemsize if whole.dtype is not None else 1
    if count < 2 or whole.dtype != piece.dtype or whole.strides is None or piece.strides is None:
        return whole, piece, offsets
    steps = [*zip(whole.strides, piece.strides, strict=True)]
    rows = [d for d, both in enumerate(steps) if both == (1, 1) and piece.dims[d] > 1]
    others = [step for d, both in enumerate(steps) if [d] != rows for step in both]
    along = [n for d in rows for n in (whole.dims[d], piece.dims[d], offsets[d])]
    if len(rows) != 1 or any(number % count for number in (*others, *along)):
        return whole, piece, offsets
    begins = [start // count if d in rows else start for d, start in enumerate(offsets)]
    return _words_of(whole, rows[0], count), _words_of(piece, rows[0], count), begins


def _in_bytes(
    whole: MemoryDesc, piece: MemoryDesc, offsets: Sequence[int]
) -> tuple[MemoryDesc, MemoryDesc, Sequence[int]]:
    """bfloat16 as pairs of bytes where there is no AVX-512: by way of float32 the smallest numbers would become 0."""
    is_narrow = whole.dtype == piece.dtype == torch.bfloat16
    if not is_narrow or whole.strides is None or piece.strides is None or has_bf16_kernels():
        return whole, piece, offsets
    return _bytes_of(whole), _bytes_of(piece), (*offsets, 0)


def _bytes_of(desc: MemoryDesc) -> MemoryDesc:
    assert desc.strides is not None and desc.dtype is not None
    count = desc.dtype.itemsize
    return strided((*desc.dims, count), torch.uint8, (*(step * count for step in desc.strides), 1))


def _words_of(desc: MemoryDesc, row: int, count: int) -> MemoryDesc:
    """`count` numbers along dimension `row`, which lie side by side, as one."""
    assert desc.strides is not None
    dims = tuple(n // count if d == row else n for d, n in enumerate(desc.dims))
    return strided(dims, _WORD, tuple(1 if d == row else step // count for d, step in enumerate(desc.strides)))
