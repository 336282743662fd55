"""Memory on huge pages: sizes, alignment, what a pool shares, and that memory goes back."""

import gc
import mmap
import platform
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zendnn_cffi.runtime import huge_pages
from zendnn_cffi.runtime.collapsing import move
from zendnn_cffi.runtime.huge_pages import ALIGNMENT_BYTES, HUGE_PAGE_BYTES, Pool, allocate

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


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 5),
        torch.ones(700, 1000),
        torch.ones(8, 300, 17, 17).to(memory_format=torch.channels_last),
        torch.ones(1200, 700).t(),
        torch.ones(1200, 700, dtype=torch.bfloat16)[:, ::2],
        torch.nn.Parameter(torch.ones(700, 1000)),
    ],
    ids=lambda tensor: f"{type(tensor).__name__}{list(tensor.shape)}{list(tensor.stride())}",
)
def test_an_empty_tensor_lies_as_torch_has_it(tensor):
    found, expected = huge_pages.empty_like(tensor), torch.empty_like(tensor)
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert found.copy_(tensor).equal(tensor)
    on_huge_pages = tensor.nbytes >= HUGE_PAGE_BYTES and type(tensor) is torch.Tensor
    assert not on_huge_pages or found.data_ptr() % HUGE_PAGE_BYTES == 0


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
    a, b, large = pool.allocate(1000), pool.allocate(1000), pool.allocate(17 << 20)
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
    assert resident_bytes() - before < 16 << 20  # what else of the process grows meanwhile included


@pytest.mark.parametrize("size", (768 * 768 * 4, 768 * 3072 * 4, 40_000))
def test_pieces_take_little_more_than_their_bytes(size):
    """The kernel counts whole huge pages."""
    pool, count = Pool(), (96 << 20) // size
    gc.collect()
    before = resident_bytes()
    pieces = [pool.allocate(size).fill_(1) for _ in range(count)]
    assert resident_bytes() - before < 1.03 * count * size + (8 << 20)
    assert len(pieces) == count


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


@given(st.integers(1, 5 * HUGE_PAGE_BYTES), st.integers(1, 5 * HUGE_PAGE_BYTES))
def test_spans_cover_every_byte_and_no_further_page(start, size):
    end = start + size
    spans = huge_pages._spans(start, end)
    assert [stop for _, stop in spans[:-1]] == [begin for begin, _ in spans[1:]]
    assert 0 <= start - spans[0][0] < HUGE_PAGE_BYTES
    assert 0 <= spans[-1][1] - end < HUGE_PAGE_BYTES
    assert all(edge % HUGE_PAGE_BYTES == 0 for span in spans for edge in span)
    assert all(begin < stop for begin, stop in spans)
    shared = [span for span in spans if span[0] < start or span[1] > end]
    assert all(stop - begin == HUGE_PAGE_BYTES for begin, stop in shared)  # on their own


def huge_bytes(start: int, end: int) -> float:
    """Bytes from start to end on huge pages, as the kernel counts them: by mapping."""
    total = 0.0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and ":" not in first:
            low, high = (int(part, 16) for part in first.split("-"))
        elif first == "AnonHugePages:":
            total += max(0, min(end, high) - max(start, low)) * int(line.split()[1]) * 1024 / (high - low)
    return total


@pytest.mark.parametrize("late", (False, True))
def test_neighbouring_tensors_share_huge_pages(late, monkeypatch):
    later = []
    monkeypatch.setattr(huge_pages.collapsing, "add", lambda *part: later.append(part))
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    mapping = mmap.mmap(-1, 12 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapping, dtype=torch.uint8).fill_(1)
    size = 3 * HUGE_PAGE_BYTES // 2
    parameters = [memory[4096 + i * size :][:size] for i in range(6)]
    values = [p.clone() for p in parameters]
    huge_pages.advise(parameters, late=late)
    assert bool(later) == late
    for owner, address, moved_bytes in later:
        move(weakref.ref(owner), address, moved_bytes)
    assert all(map(torch.equal, parameters, values))
    if enabled.exists() and "[never]" not in enabled.read_text() and _kernel() >= (6, 1):
        assert huge_bytes(memory.data_ptr(), memory.data_ptr() + 6 * size) > 4.5 * size


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


def test_without_huge_pages_it_is_ordinary_memory(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    memory = huge_pages.allocate(5 << 20)
    assert memory.numel() == 5 << 20
    assert memory.data_ptr() % ALIGNMENT_BYTES == 0


def test_more_than_there_is_raises_memory_error():
    with pytest.raises(MemoryError, match="cannot allocate"):
        allocate(1 << 60)


def test_reused_memory_is_the_same_until_more_is_wanted():
    memory = huge_pages.Reused()
    first = memory.take(1000)
    assert memory.take(10).data_ptr() == memory.take(1000).data_ptr() == first.data_ptr()
    larger = memory.take(5000)
    assert larger.numel() == 5000 and larger.data_ptr() % ALIGNMENT_BYTES == 0
    assert memory.take(5000).data_ptr() == larger.data_ptr()
