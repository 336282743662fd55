"""Memory in which reading or writing beyond an operand shows."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from zendnn_cffi.primitives.verification.places import Bordered, Guarded, border_bytes

TOUCH = """
import ctypes
from zendnn_cffi.primitives.verification.places import Guarded
place = Guarded({size}, at_end={at_end})
first, last = place.inside.data_ptr(), place.inside.data_ptr() + {size} - 1
ctypes.memset(first, 1, {size})
assert place.inside.sum() == {size}
print("whole", flush=True)
ctypes.string_at({where}, 1)
print("beyond", flush=True)
"""


@pytest.mark.parametrize("size", [100, 4096])
@pytest.mark.parametrize(("at_end", "where"), [(True, "last + 1"), (False, "first - 1")])
def test_touching_a_guard_page_ends_the_process(run_python: Any, size: int, at_end: bool, where: str) -> None:
    done = run_python(TOUCH.format(size=size, at_end=at_end, where=where), check=False)
    assert done.returncode == -signal.SIGSEGV and done.stdout == "whole\n"


def test_guarded_memory_starts_poisoned_and_is_given_back() -> None:
    places = [Guarded(64, True) for _ in range(3)]
    assert all(bool(place.inside.view(torch.float32).isnan().all()) for place in places)
    assert all(place.is_intact() for place in places)


@pytest.mark.parametrize("size", [0, 1, 64, 1000])
@pytest.mark.parametrize("beyond", [-1, 0])
def test_borders_show_writes(size: int, beyond: int) -> None:
    place = Bordered(size, 256)
    place.inside.fill_(3)
    assert place.inside.numel() == size and place.inside.data_ptr() % 64 == 0 and place.is_intact()
    storage = torch.empty(0, dtype=torch.uint8).set_(place.inside.untyped_storage())
    start = place.inside.storage_offset()
    assert bool(storage[:start].view(-1).eq(0xFF).all())
    storage[start - 1 if beyond else start + size] = 0
    assert not place.is_intact()


def test_borders_hold_the_largest_operand() -> None:
    assert border_bytes([10, 100_000]) == 100_000
    assert border_bytes([10]) == 4096
    assert border_bytes([1 << 40]) == 16 << 20
