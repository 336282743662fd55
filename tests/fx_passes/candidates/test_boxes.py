"""Copies of boxes: right for every type and layout, and in words where rows consist of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fx_passes.candidates.boxes import box_reorder
from fx_passes.candidates.layouts import layout, row_major, strided
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC
from zendnn_cffi.primitives.memory import Memory, MemoryDesc
from zendnn_cffi.primitives.primitive import Primitive

DTYPES = (torch.uint8, torch.int8, torch.bfloat16, torch.float32, torch.int32)


def bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of any bits, NaN's among them."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator).byte().view(dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A shape, and where a box of it begins and how large it is."""
    shape = tuple(draw(st.lists(st.integers(1, 24), min_size=1, max_size=4)))
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return shape, offsets, tuple(draw(st.integers(1, n - start)) for n, start in zip(shape, offsets, strict=True))


@pytest.mark.parametrize("into", [False, True])
@settings(deadline=None)  # the library compiles each
@given(box=boxes(), dtype=st.sampled_from(DTYPES), turned=st.booleans())
def test_bits_are_copied(box: tuple[tuple[int, ...], ...], dtype: torch.dtype, turned: bool, into: bool) -> None:
    shape, offsets, sizes = box

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        """The last dimension lies side by side; turned: the first one."""
        return bits(shape[::-1], dtype).permute(*reversed(range(len(shape)))) if turned else bits(shape, dtype)

    whole, piece = tensor(shape), tensor(sizes).clone(memory_format=torch.preserve_format)
    descs = (strided(tuple(t.shape), dtype, t.stride()) for t in (whole, piece))
    pd = box_reorder(*descs, offsets, into=into)
    assert pd is not None
    seen = whole[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
    expected = (piece if into else seen).clone()
    src, dst = (piece, whole) if into else (whole, piece)
    base = {id(whole): whole.untyped_storage(), id(piece): piece.untyped_storage()}
    memories = [
        Memory(desc, torch.empty(0, dtype=desc.dtype).set_(base[id(t)]))
        for desc, t in ((pd.src_desc, src), (pd.dst_desc, dst))
    ]
    Primitive(pd).execute(dict(zip((ARG_SRC, ARG_DST), memories, strict=True)))
    assert torch.equal(as_bytes(seen if into else piece), as_bytes(expected))


ROWS, LAST = row_major((3, 8), torch.uint8), layout((1, 8, 2, 3), torch.uint8, "nhwc")


@pytest.mark.parametrize(
    ("whole", "piece", "offsets", "dims"),
    [
        (ROWS, row_major((3, 4), torch.uint8), (0, 4), (3, 1)),
        (LAST, layout((1, 4, 2, 3), torch.uint8, "nhwc"), (0, 4, 0, 0), (1, 1, 2, 3)),
        (row_major((3, 8), torch.bfloat16), row_major((3, 6), torch.bfloat16), (0, 2), (3, 3)),
        (ROWS, row_major((3, 4), torch.uint8), (0, 2), None),
        (ROWS, row_major((3, 3), torch.uint8), (0, 4), None),
        (row_major((3, 9), torch.uint8), row_major((3, 4), torch.uint8), (0, 4), None),
        (ROWS, strided((3, 4), torch.uint8, (1, 3)), (0, 4), None),
        (strided((3, 8), torch.uint8, (10, 1)), row_major((3, 4), torch.uint8), (0, 4), None),
        (ROWS, row_major((3, 1), torch.uint8), (0, 4), None),
        (row_major((3, 8), torch.float32), row_major((3, 4), torch.float32), (0, 4), None),
    ],
    ids=[
        "rows",
        "channels last",
        "bf16",
        "begins within a word",
        "ends within one",
        "odd rows",
        "columns",
        "odd gaps",
        "one wide",
        "floats",
    ],
)
def test_words(whole: MemoryDesc, piece: MemoryDesc, offsets: tuple[int, ...], dims: tuple[int, ...] | None) -> None:
    pd = box_reorder(whole, piece, offsets)
    assert pd is not None and pd.dst_desc is not None
    assert (pd.dst_desc.dtype, pd.dst_desc.dims) == ((torch.int32, dims) if dims else (piece.dtype, piece.dims))


def test_blocks_that_would_be_cut() -> None:
    blocks = layout((1, 32, 2, 2), torch.float32, "nChw16c")
    assert box_reorder(blocks, layout((1, 8, 2, 2), torch.float32, "nchw"), (0, 8, 0, 0)) is None
