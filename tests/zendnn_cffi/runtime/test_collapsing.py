"""Memory that begins on ordinary pages and moves onto huge ones: its values stay, and what is gone is left alone."""

from __future__ import annotations

import gc
import mmap
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zendnn_cffi.runtime.test_huge_pages import _kernel, huge_bytes
from zendnn_cffi.runtime import collapsing, huge_pages
from zendnn_cffi.runtime.collapsing import HUGE_PAGE_BYTES, Collapsing, move

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
has_huge_pages = ENABLED.exists() and "[never]" not in ENABLED.read_text() and _kernel() >= (6, 1)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> list[tuple[weakref.ref[Any], int, int]]:
    """What is to be moved later; huge pages are slow to get."""
    found: list[tuple[weakref.ref[Any], int, int]] = []
    monkeypatch.setattr(huge_pages.collapsing, "add", lambda owner, *place: found.append((weakref.ref(owner), *place)))
    monkeypatch.setattr(huge_pages, "are_slow", lambda *_: True)
    return found


@pytest.mark.parametrize("size", (HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES - 4096, 3 * HUGE_PAGE_BYTES + 64))
def test_memory_moves_later(size: int, later: list[tuple[weakref.ref[Any], int, int]]) -> None:
    memory = huge_pages.allocate(size, late=True)
    memory.copy_(torch.arange(size, dtype=torch.int64).to(torch.uint8))
    begin, expected = memory.data_ptr(), memory.clone()
    assert huge_bytes(begin, begin + size) == 0
    ((owner, address, moved_bytes),) = later
    assert address == begin and size - HUGE_PAGE_BYTES < moved_bytes < size + HUGE_PAGE_BYTES
    move(owner, address, moved_bytes)
    assert torch.equal(memory, expected)
    if has_huge_pages:
        assert huge_bytes(begin, begin + size) > 0.9 * min(size, moved_bytes)


def test_memory_stays_where_it_is_where_no_thread_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has too many, or Python is ending."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    memory = huge_pages.allocate(HUGE_PAGE_BYTES)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    Collapsing().add(memory, memory.data_ptr(), HUGE_PAGE_BYTES)


def test_memory_that_is_gone_is_left_alone(later: list[tuple[weakref.ref[Any], int, int]]) -> None:
    memory = huge_pages.allocate(HUGE_PAGE_BYTES, late=True)
    del memory
    gc.collect()
    ((owner, address, size),) = later
    assert owner() is None
    move(owner, address, size)


def test_quick_huge_pages_are_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[object] = []
    monkeypatch.setattr(huge_pages.collapsing, "add", lambda *place: added.append(place))
    monkeypatch.setattr(huge_pages, "_slow_until", 0.0)
    monkeypatch.setattr(huge_pages, "_SLOW_NS", 10**12)
    memory = huge_pages.allocate(8 << 20, late=True).fill_(1)
    assert added == []
    if has_huge_pages:
        assert huge_bytes(memory.data_ptr(), memory.data_ptr() + memory.numel()) > 6 << 20


def test_what_was_slow_is_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages.collapsing, "add", lambda *_: None)
    monkeypatch.setattr(huge_pages, "_slow_until", 0.0)
    monkeypatch.setattr(huge_pages, "_SLOW_NS", -1)
    tried: list[int] = []
    original = mmap.mmap

    class Noting(original):  # type: ignore[valid-type, misc]
        def madvise(self, option: int, *place: int) -> None:
            tried.append(option)
            super().madvise(option, *place)

    monkeypatch.setattr(mmap, "mmap", Noting)
    for _ in range(3):
        huge_pages.allocate(8 << 20, late=True)
    assert tried.count(mmap.MADV_HUGEPAGE) == 1 and tried.count(mmap.MADV_NOHUGEPAGE) == 3


def test_the_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    done = threading.Event()

    def moving(owner: object, address: int, size: int, pause: threading.Event) -> None:
        moved.append(address)
        if len(moved) == 2:
            done.set()

    monkeypatch.setattr(collapsing, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(collapsing, "move", moving)
    queue, owner = Collapsing(), torch.empty(1)
    for round_ in range(2):
        done.clear()
        moved.clear()
        with queue._lock:
            queue.add(owner, 2 * round_, 1)
            queue.add(owner, 2 * round_ + 1, 1)
            thread = queue._thread
        assert thread is not None and done.wait(60)
        thread.join(60)
        assert moved == [2 * round_, 2 * round_ + 1] and not thread.is_alive() and queue._thread is None
