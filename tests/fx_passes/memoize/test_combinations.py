"""What memoised modules remember takes so many bytes all together; the oldest goes first."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import zendnn_cffi
from fx_passes.memoize import combinations
from fx_passes.memoize.combinations import Combinations, remembered_bytes
from fx_passes.memoize.masks import additive


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Room for ten results of 4000 bytes, and nothing in it."""
    gc.collect()
    combinations.forget_all()
    monkeypatch.setattr(combinations, "LIMIT_BYTES", 40_000)
    monkeypatch.setattr(combinations, "_most", 0)
    yield
    combinations.forget_all()


def keep(where: Combinations, key: int, elements: int = 1000) -> bool:
    return where.keep(key, (), (torch.zeros(elements),), where.state)


def keys(*modules: Combinations) -> list[list[int]]:
    return [[key for key in range(100) if module.get(key)] for module in modules]


def test_the_oldest_of_all_modules_goes_first() -> None:
    first, second = Combinations(16), Combinations(16)
    for key in range(8):
        keep(first if key % 2 else second, key)
    assert keys(first, second) == [[1, 3, 5, 7], [0, 2, 4, 6]] and remembered_bytes() == 32_000
    keep(second, 8, 6000)
    assert keys(first, second) == [[7], [8]] and remembered_bytes() == 28_000


def test_what_is_computed_again_is_the_newest() -> None:
    module = Combinations(2)
    for key in (1, 2, 1, 3):
        keep(module, key)
    assert keys(module) == [[1, 3]]


def test_what_is_too_large_drives_nothing_out() -> None:
    module, small = Combinations(16), Combinations(16, most_bytes=4000)
    assert keep(module, 1) and keep(small, 1) and not keep(small, 2, 1001)
    assert keys(module, small) == [[1], [1]]


def test_modules_that_are_gone_take_no_room() -> None:
    module = Combinations(16)
    keep(module, 1)
    del module
    gc.collect()
    assert remembered_bytes() == 0
    gone, module = Combinations(16), Combinations(16)
    for key in range(9):
        keep(gone, key)
    del gone
    gc.collect()
    for key in range(10):
        keep(module, key)
    assert keys(module) == [[*range(10)]]


def test_masks_may_become_larger() -> None:
    """Room is left for float32 ones that are made of boolean ones."""
    module = Combinations(16)
    for key in range(4):
        mask = torch.ones(1, 1, 50, 50, dtype=torch.bool).tril()
        module.keep(key, (), (mask,), module.state)
        additive(mask, False)
    assert keys(module) == [[2, 3]] and remembered_bytes() == 2 * 5 * 2500


def test_what_was_made_of_a_mask_counts() -> None:
    module = Combinations(16)
    mask = torch.ones(1, 1, 50, 50, dtype=torch.bool).tril()
    module.keep(1, (), (mask,), module.state)
    assert module.nbytes == 2500
    additive(mask, False)
    assert module.nbytes == 2500 + 4 * 2500
    additive(mask, False)
    assert module.nbytes == 2500 + 4 * 2500


def test_what_was_computed_before_a_change_is_not_kept() -> None:
    module = Combinations(16)
    state = module.state
    module.clear()
    assert not module.keep(1, (), (torch.zeros(1),), state) and keep(module, 1)


class Positions(torch.nn.Module):
    """Rows of a table by position, in a way that depends on the length alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * torch.arange(1, 9)
        return self.layer(x) + places.sin() * places.cos()


@torch.no_grad()
def test_it_is_counted_and_given_back() -> None:
    model, x = Positions().eval(), torch.randn(2, 5, 8)
    gm = zendnn_cffi.optimize(model, (x,), tune="off")
    gm(x)
    torch.testing.assert_close(gm(x), model(x))
    assert zendnn_cffi.cache_info().remembered_bytes == 5 * 8 * 4
    zendnn_cffi.cache_clear()
    assert zendnn_cffi.cache_info().remembered_bytes == 0
    torch.testing.assert_close(gm(x), model(x))
    assert zendnn_cffi.cache_info().remembered_bytes == 5 * 8 * 4
