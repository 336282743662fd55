"""Joined tables against the tables, one by one: wherever they lie, no row is another's."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch
import torch.nn.functional as F

from tests.tolerance import assert_close
from zendnn_cffi.runtime import huge_pages
from zendnn_cffi.runtime.joined_tables import MODES, BagGroup, RowGroup, join_tables

WIDTH = 16


def lying_at(
    *offsets: int, rows: int = 7, width: int = WIDTH, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Tables in one allocation, at these distances (elements) from its beginning; everything else is NaN."""
    memory = torch.full((max(offsets) + rows * width,), torch.nan, dtype=dtype)
    tables = [memory.as_strided((rows, width), (width, 1), offset) for offset in offsets]
    for number, table in enumerate(tables):
        table.copy_(torch.randn(rows, width, generator=torch.Generator().manual_seed(number)))
    return tables


@pytest.mark.parametrize(
    ("offsets", "groups"),
    (
        ((0,), [(0,)]),
        ((0, 7 * WIDTH), [(0, 1)]),
        ((40 * WIDTH, 0, 20 * WIDTH), [(0, 1, 2)]),
        ((0, 20 * WIDTH + 4, 40 * WIDTH, 60 * WIDTH + 4), [(0, 2), (1, 3)]),
        ((0, 20 * WIDTH + 4, 40 * WIDTH + 8), [(0,), (1,), (2,)]),
    ),
    ids=str,
)
def test_every_row_is_found(offsets: tuple[int, ...], groups: list[tuple[int, ...]]) -> None:
    tables = lying_at(*offsets)
    joined = join_tables(tables)
    assert [group.members for group in joined] == groups
    for group in joined:
        for member, first in zip(group.members, group.first, strict=True):
            assert torch.equal(group.table[first : first + 7], tables[member])
            assert group.table[first].data_ptr() == tables[member].data_ptr(), "a row was copied"


def test_refuses_what_cannot_be_one_table() -> None:
    table = torch.zeros(3, 4)
    for other in (torch.zeros(3, 5), torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(4, 3).T, torch.zeros(12)):
        with pytest.raises(ValueError, match="tables must be contiguous"):
            join_tables([table, other])


def test_tables_in_allocations_of_their_own() -> None:
    tables = [torch.randn(rows, 64) for rows in (3, 5000, 1, 70_000)]
    for group in join_tables(tables):
        for member, first in zip(group.members, group.first, strict=True):
            assert torch.equal(group.table[first : first + len(tables[member])], tables[member])


def test_memory_between_tables_is_not_read() -> None:
    """Between the tables lies memory that nobody may touch, more bytes of it than 32 bits count."""
    size, page = 5 << 30, mmap.PAGESIZE
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapping, dtype=torch.float32)
    tables = [memory[:70].view(7, 10), memory[-70:].view(7, 10)]
    for number, table in enumerate(tables):
        table.copy_(torch.arange(70.0).view(7, 10) + 1000 * number)
    mprotect = ctypes.CDLL(None).mprotect
    mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert mprotect(memory.data_ptr() + page, size - 2 * page, 0) == 0
    out = torch.empty(1, 2, 10)
    group = BagGroup(tables, [2, 2], 1, "sum")
    assert len(group.parts) == 1
    group.run_into(torch.tensor([[0, 6, 6, 0]]), out)
    assert torch.equal(out[0], torch.stack([table[0] + table[6] for table in tables]))


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", ((1, 1, 1, 1), (3, 3, 3, 3), (1, 17, 2, 5)), ids=str)
@pytest.mark.parametrize("spread", (0, 4), ids=("together", "in two groups"))
def test_bags_equal_those_of_each_table(
    spread: int, lengths: tuple[int, ...], mode: str, dtype: torch.dtype, threads: int
) -> None:
    tables = lying_at(0, 20 * WIDTH + spread, 60 * WIDTH, 40 * WIDTH + spread, dtype=dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for batch in (1, 33):
            indices = [torch.randint(0, 7, (batch, length)) for length in lengths]
            group = BagGroup(tables, lengths, batch, mode)
            assert len(group.parts) == (2 if spread else 1)
            whole = torch.full((batch, 4 * WIDTH + 5), 3.0, dtype=dtype)
            joined = torch.cat(indices, 1)
            assert group.in_range(joined)
            group.run_into(joined, whole[:, 2:-3].unflatten(1, (4, WIDTH)))
            each = [F.embedding_bag(i, t.double(), mode=mode) for i, t in zip(indices, tables, strict=True)]
            assert_close(whole[:, 2:-3], torch.cat(each, 1), dtype=dtype, k=max(lengths))
            assert bool((whole[:, :2] == 3).all() and (whole[:, -3:] == 3).all()), "neighbours were written"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("index_dtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("batch", (0, 1, 33))
def test_rows_equal_those_of_each_table(batch: int, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    """Tables of two row lengths by turns, of which two cannot be joined, and one by itself."""
    wide, narrow = lying_at(0, 40 * WIDTH, 20 * WIDTH + 4, dtype=dtype), lying_at(0, 30, width=3, dtype=dtype)
    tables = [wide[0], narrow[1], wide[1], torch.randn(2, 1).to(dtype), wide[2], narrow[0]]
    group = RowGroup(tables)
    assert len(group.parts) == 4
    indices = torch.stack([torch.randint(0, len(table), (batch,), dtype=index_dtype) for table in tables], 1)
    beside = torch.randn(batch, 2).to(dtype), torch.randn(batch, 5).to(dtype)
    memory = torch.full((batch, 7 + sum(table.shape[1] for table in tables)), 3.0, dtype=dtype)
    group.run_into(indices, memory, beside[:1], beside[1:])
    rows = [F.embedding(index, table) for index, table in zip(indices.unbind(1), tables, strict=True)]
    assert torch.equal(memory, torch.cat([beside[0], *rows, beside[1]], 1))


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
def test_each_table_has_its_own_range(dtype: torch.dtype) -> None:
    tables = [torch.zeros(rows, 4) for rows in (3, 9, 5)]
    group = BagGroup(tables, (1, 2, 1), 2, "sum")
    assert group.in_range(torch.tensor([[2, 8, 8, 4], [0, 0, 0, 0]], dtype=dtype))
    for bad in ((3, 0, 0, 0), (0, 9, 0, 0), (0, 0, 9, 0), (0, 0, 0, 5), (-1, 0, 0, 0), (0, 0, 0, -1)):
        assert not group.in_range(torch.tensor([[0, 0, 0, 0], bad], dtype=dtype))
    assert not group.in_range(torch.tensor([[2**31 - 1] * 4], dtype=dtype))


def test_huge_pages_under_a_table_keep_its_values() -> None:
    table = torch.arange(float(3 << 19)).view(-1, 64)  # 6 MiB: at least one huge page lies wholly in it
    huge_pages.advise([table, torch.zeros(3), torch.zeros(0)])
    assert torch.equal(table.view(-1), torch.arange(float(3 << 19)))
