"""Memory is used again, of its own size class, and not without bound."""

from __future__ import annotations

import pytest

from fx_passes.search import scratch
from fx_passes.search.scratch import Scratch, size_class


@pytest.mark.parametrize("size_bytes", [1, 3, 65_535, 65_536, 65_537, 1 << 20, (1 << 20) + 1, 123_456_789])
def test_a_size_class_is_little_larger(size_bytes: int) -> None:
    assert size_bytes <= size_class(size_bytes) <= 1.125 * size_bytes
    assert size_class(size_class(size_bytes)) == size_class(size_bytes)


def test_a_buffer_given_back_is_taken_again() -> None:
    memory = Scratch()
    buffer = memory.take(100_000)
    assert buffer.numel() >= 100_000 and buffer.data_ptr() % 64 == 0
    other = memory.take(100_000)
    assert other.data_ptr() != buffer.data_ptr()
    address = buffer.data_ptr()
    memory.give_back(buffer)
    assert memory.take(100_000).data_ptr() == address
    assert memory.take(100_000).data_ptr() != address, "only once"


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_KEPT_BYTES", 300_000)
    memory = Scratch()
    buffers = [memory.take(131_072) for _ in range(4)]
    for buffer in buffers:
        memory.give_back(buffer)
    again = [memory.take(131_072) for _ in range(4)]
    assert len({b.data_ptr() for b in buffers} & {b.data_ptr() for b in again}) >= 2
    assert memory._free_bytes == 0


def test_cleared_it_keeps_nothing() -> None:
    memory = Scratch()
    memory.give_back(memory.take(100_000))
    assert memory._free_bytes > 0
    memory.clear()
    assert memory._free_bytes == 0 and not memory._free


def test_what_came_from_elsewhere_is_let_go() -> None:
    memory = Scratch()
    memory.give_back(memory.take(100_000)[:99_999])
    assert memory._free_bytes == 0
