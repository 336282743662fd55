"""Memory for what kernels stream through: packed weights and activations, on huge pages where the system has them.

A kernel that walks a few megabytes of weights in blocks touches a new 4 KiB page every few rows; with 2 MiB pages the
translations of a whole layer fit the TLB. Linux gives them to memory that asks for it (MADV_HUGEPAGE) where
/sys/kernel/mm/transparent_hugepage/enabled says "madvise" or "always". Elsewhere this is ordinary memory.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Iterable, Iterator

import torch

from zendnn_cffi.runtime.collapsing import HUGE_PAGE_BYTES, MADV_COLLAPSE, collapsing
from zendnn_cffi.runtime.madvise import madvise

ALIGNMENT_BYTES = 64  # a cache line
# What is not touched of a chunk is no memory.
_FIRST_CHUNK_BYTES, _LARGEST_CHUNK_BYTES = 256 << 10, 64 << 20
_COLLAPSED_BYTES = (
    4 << 30
)  # collapsing takes about two seconds per GiB: what is larger is left to the kernel's own pace
# A tensor from this size on has a mapping of its own, given back when the tensor dies.
_OWN_MAPPING_BYTES = 16 << 20
_MOST_UNFILLED = 1 / 16  # of a tensor's bytes, that its last huge page may have in addition
_SLOW_NS = 800_000  # for the first write to a huge page: ordinary pages of that size take so long
_SLOW_SECONDS = 10.0  # so long nobody looks again
_slow_until = 0.0


def allocate(size_bytes: int, *, late: bool = False) -> torch.Tensor:
    """Return a uint8 tensor of size_bytes, on a cache line's boundary, on huge pages if it fills one; not initialised.

    late  where huge pages take long to get, begin on ordinary ones (zendnn_cffi.runtime.collapsing)
    A last huge page that would be filled less than half, or have much unfilled for the tensor's size, is ordinary
    pages instead, so little memory is wasted.
    """
    if size_bytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        raw = torch.empty(size_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device="cpu")
        return _aligned(raw, ALIGNMENT_BYTES, size_bytes)
    huge_bytes, unfilled = size_bytes - size_bytes % HUGE_PAGE_BYTES, -size_bytes % HUGE_PAGE_BYTES
    if unfilled <= min(HUGE_PAGE_BYTES // 2, size_bytes * _MOST_UNFILLED):
        huge_bytes = size_bytes + unfilled
    mapped_bytes = max(size_bytes, huge_bytes) + HUGE_PAGE_BYTES
    try:
        mapping = mmap.mmap(-1, mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate {size_bytes} bytes: {error}") from error
    memory = _aligned(torch.frombuffer(mapping, dtype=torch.uint8), HUGE_PAGE_BYTES, size_bytes)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        if late and are_slow(mapping, memory):
            mapping.madvise(mmap.MADV_NOHUGEPAGE, memory.storage_offset(), huge_bytes)
            collapsing.add(mapping, memory.data_ptr(), huge_bytes)
        else:  # no further: all of a page is taken
            mapping.madvise(mmap.MADV_HUGEPAGE, memory.storage_offset(), huge_bytes)
    return memory


def are_slow(mapping: mmap.mmap, memory: torch.Tensor) -> bool:
    """Whether huge pages take longer to get than ordinary ones: tried with a few of memory, or found lately."""
    global _slow_until
    if time.monotonic() < _slow_until:
        return True
    whole = memory.numel() // HUGE_PAGE_BYTES
    for page in sorted({0, whole // 2, whole - 1}):  # who gave memory back lately finds some of it at once
        start = page * HUGE_PAGE_BYTES
        mapping.madvise(mmap.MADV_HUGEPAGE, memory.storage_offset() + start, HUGE_PAGE_BYTES)
        since = time.thread_time_ns()
        memory[start : start + 1].zero_()
        if time.thread_time_ns() - since > _SLOW_NS:
            _slow_until = time.monotonic() + _SLOW_SECONDS
            return True
    return False


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """As torch.empty_like, on huge pages where it fills one: a first write to 100 MB then takes 15 ms, not 57."""
    if tensor.nbytes < HUGE_PAGE_BYTES or type(tensor) is not torch.Tensor or not tensor.is_cpu:
        return torch.empty_like(tensor)
    return like(tensor, allocate(tensor.nbytes))


def like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """As torch.empty_like, in memory that is there: as many bytes."""
    own = torch.empty_like(tensor, device="meta")  # which has the strides: gaps go, the order stays
    return memory.view(tensor.dtype).as_strided(own.shape, own.stride())


def advise(tensors: Iterable[torch.Tensor], *, late: bool = False) -> None:
    """Ask for huge pages under tensors that are there already, now where the system can; their values stay.

    late  by a thread, seconds later (zendnn_cffi.runtime.collapsing)

    For weights and tables that are read where they lie: with ordinary pages, nearly each row needs another address
    translation, and reading ahead ends with each page. The huge pages that a tensor shares with its neighbours are
    asked for too: parameters lie one behind the other, and half of those of a 3 MiB matrix are such.
    """
    large = [tensor for tensor in tensors if tensor.nbytes >= HUGE_PAGE_BYTES // 2]
    give_advice = madvise() if large else None
    if give_advice is None or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    collapsed_bytes = 0
    for tensor in large:
        size_bytes = tensor.nbytes
        start, end = tensor.data_ptr(), tensor.data_ptr() + size_bytes
        first = _down(start, mmap.PAGESIZE)
        if give_advice(first, _up(end, mmap.PAGESIZE) - first, mmap.MADV_HUGEPAGE) != 0:
            continue
        collapsed_bytes += size_bytes
        if collapsed_bytes <= _COLLAPSED_BYTES:
            for begin, stop in _spans(start, end):
                if late:
                    collapsing.add(tensor, begin, stop - begin)
                else:
                    give_advice(begin, stop - begin, MADV_COLLAPSE)


def _spans(start: int, end: int) -> list[tuple[int, int]]:
    """The huge pages from start to end: those wholly inside, and the first and the last on their own.

    The kernel refuses a huge page that does not lie in one mapping, and with it what comes after it in the same call.
    """
    inner = _up(start, HUGE_PAGE_BYTES), _down(end, HUGE_PAGE_BYTES)
    outer = _down(start, HUGE_PAGE_BYTES), _up(end, HUGE_PAGE_BYTES)
    if inner[0] > inner[1]:  # all in one huge page
        return [outer]
    spans = (outer[0], inner[0]), inner, (inner[1], outer[1])
    return [(begin, stop) for begin, stop in spans if begin < stop]


def _down(address: int, boundary: int) -> int:
    return address - address % boundary


def _up(address: int, boundary: int) -> int:
    return address + -address % boundary


class Pool:
    """Hands out pieces of a few large allocations, so that small tensors share huge pages. Not thread-safe.

    A chunk lives as long as any tensor from it: use one pool for tensors that die together.
    late  as in allocate()
    """

    def __init__(self, *, late: bool = False) -> None:
        self._late = late
        self._free = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._chunk_bytes = _FIRST_CHUNK_BYTES

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return a uint8 tensor of size_bytes, on a cache line's boundary, not initialised."""
        if size_bytes >= _OWN_MAPPING_BYTES:
            return allocate(size_bytes, late=self._late)
        if self._free.numel() < size_bytes:
            self._free = allocate(max(self._chunk_bytes, size_bytes), late=self._late)
            self._chunk_bytes = min(2 * self._chunk_bytes, _LARGEST_CHUNK_BYTES)
        piece = self._free[:size_bytes]
        self._free = self._free[-(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES :]
        return piece


class Reused:
    """Memory for one tensor at a time, which the next one overwrites: only the first costs page faults.

    On ordinary pages: a few are recycled, where a new huge page may be one that a host has to find memory for.
    Not thread-safe.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return a uint8 tensor of size_bytes, on a cache line's boundary, not initialised."""
        if self._memory.numel() < size_bytes:
            with torch.inference_mode(False):
                raw = torch.empty(size_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device="cpu")
                self._memory = _aligned(raw, ALIGNMENT_BYTES, size_bytes)
        return self._memory[:size_bytes]


_lent = threading.local()


@contextlib.contextmanager
def lending(memory: Reused) -> Iterator[None]:
    """Let what this thread computes next lie in memory: it is gone when memory is taken again."""
    _lent.memory = memory
    try:
        yield
    finally:
        _lent.memory = None


def lent() -> Reused | None:
    """What the thread was lent, for one who computes a large result; the next one finds none."""
    memory, _lent.memory = getattr(_lent, "memory", None), None
    return memory


def _aligned(raw: torch.Tensor, alignment: int, size_bytes: int) -> torch.Tensor:
    start = -raw.data_ptr() % alignment
    return raw[start : start + size_bytes]
