"""Memory on huge pages: sizes, alignment, what a pool shares, and that memory goes back."""

import gc
import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zendnn_cffi import huge_pages
from zendnn_cffi.huge_pages import ALIGNMENT_BYTES, HUGE_PAGE_BYTES, Pool, allocate

SIZES = (0, 1, 63, 64, 4096, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5, 9 * HUGE_PAGE_BYTES // 2)


@pytest.mark.parametrize("size", SIZES)
def test_memory_has_the_size_and_lies_on_a_boundary(size):
    memory = allocate(size)
    assert memory.dtype == torch.uint8
    assert memory.shape == (size,)
    assert memory.is_contiguous()
    boundary = HUGE_PAGE_BYTES if size >= HUGE_PAGE_BYTES else ALIGNMENT_BYTES
    assert not size or memory.data_ptr() % boundary == 0
    memory.fill_(7)
    assert bool((memory == 7).all())


@given(st.lists(st.integers(0, 3 << 20), min_size=1, max_size=12))
def test_pieces_of_a_pool_do_not_overlap(sizes):
    pool = Pool()
    pieces = [pool.allocate(size) for size in sizes]
    for number, piece in enumerate(pieces):
        assert piece.numel() == sizes[number]
        assert not piece.numel() or piece.data_ptr() % ALIGNMENT_BYTES == 0
        piece[:1] = number
        piece[-1:] = number
    for number, piece in enumerate(pieces):
        assert piece[:1].tolist() in ([], [number])
        assert piece[-1:].tolist() in ([], [number])
    spans = sorted((p.data_ptr(), p.data_ptr() + p.numel()) for p in pieces if p.numel())
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


def test_small_pieces_share_a_chunk_and_large_ones_do_not():
    pool = Pool()
    a, b, large = pool.allocate(1000), pool.allocate(1000), pool.allocate(5 << 20)
    assert b.data_ptr() - a.data_ptr() == 1024
    assert large.untyped_storage().data_ptr() != a.untyped_storage().data_ptr()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_goes_back_with_its_tensor():
    gc.collect()
    before = resident_bytes()
    memory = allocate(64 << 20).fill_(1)
    assert resident_bytes() - before > 60 << 20
    del memory
    gc.collect()
    assert resident_bytes() - before < 8 << 20


def test_the_kernel_is_asked_for_huge_pages():
    memory = allocate(8 << 20)
    flags = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            inside = start <= memory.data_ptr() < end
        elif line.startswith("VmFlags:") and inside:
            flags = line
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        assert " hg" in flags


def test_without_huge_pages_it_is_ordinary_memory(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    memory = huge_pages.allocate(5 << 20)
    assert memory.numel() == 5 << 20
    assert memory.data_ptr() % ALIGNMENT_BYTES == 0


def test_more_than_there_is_raises_memory_error():
    with pytest.raises(MemoryError, match="cannot allocate"):
        allocate(1 << 60)
