"""Memory of large results is used again only when nobody can see it any more."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from tests.support.lowering import net, noise
from zendnn_cffi.runtime import recycled
from zendnn_cffi.runtime.recycled import Pool

SHAPE, STRIDES = (2, 300, 128), (300 * 128, 128, 1)


def take(pool: Pool, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return pool.empty_strided(shape, strides, dtype)


@pytest.fixture(params=["strided", "dense"], autouse=True)
def dense(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to ask for memory."""
    if request.param == "dense":
        monkeypatch.setattr(Pool, "empty_strided", lambda pool, shape, strides, dtype: pool.empty(shape, dtype))


def test_used_again_once_dropped() -> None:
    pool = Pool()
    first = take(pool)
    pointer = first.data_ptr()
    assert take(pool).data_ptr() != pointer
    del first
    again = take(pool, (2, 299, 128))
    assert again.data_ptr() == pointer and again.shape == (2, 299, 128) and again.is_contiguous()
    del again
    assert take(pool, dtype=torch.bfloat16).data_ptr() != pointer  # half the size


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda t: t[1:, ::2],
    "detached": lambda t: t.detach(),
    "data": lambda t: t.data,
    "array": lambda t: t.numpy()[0],
    "memoryview": lambda t: memoryview(t.numpy()),
    "storage": lambda t: t.untyped_storage(),
    "dlpack": lambda t: torch.from_dlpack(t),
    "parameter": lambda t: nn.Parameter(t),
    "viewed as another dtype": lambda t: t.view(torch.int32),
    "in a graph": lambda t: nn.Parameter(torch.ones(())) * t,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_not_while_anything_refers_to_it(holder: str) -> None:
    pool = Pool()
    tensor = take(pool)
    pointer = tensor.data_ptr()
    held = HOLDERS[holder](tensor)
    del tensor
    gc.collect()
    others = [take(pool) for _ in range(3)]
    assert pointer not in [other.data_ptr() for other in others]
    del held
    gc.collect()
    assert take(pool).data_ptr() == pointer


@pytest.mark.parametrize(
    "change", (lambda t: t.share_memory_(), lambda t: t.resize_(1 << 20)), ids=("shared", "resized")
)
def test_what_was_shared_or_resized_is_forgotten(change: Callable[[torch.Tensor], object]) -> None:
    pool = Pool()
    tensor = take(pool)
    change(tensor)
    pointer = tensor.data_ptr()
    del tensor
    fresh = take(pool)
    assert fresh.data_ptr() != pointer and not fresh.is_shared()
    assert fresh.untyped_storage().nbytes() == pool.size_bytes < 1 << 20


def test_small_ones_are_not_remembered() -> None:
    pool = Pool()
    take(pool, (2, 8))
    take(pool, (0, 1 << 20))
    assert pool.size_bytes == 0


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycled, "LIMIT_BYTES", 4 << 20)
    pool = Pool()
    held = [take(pool, (1 << 18,)) for _ in range(9)]  # a MiB each
    assert pool.size_bytes <= 4 << 20 and pool.free_bytes == 0
    assert len({t.data_ptr() for t in held}) == 9
    del held
    for size in range(1, 9):
        take(pool, (size << 17,))
    take(pool, (1 << 22,))  # larger than the limit
    assert pool.size_bytes <= 4 << 20
    pool.clear()
    assert pool.size_bytes == pool.free_bytes == 0


def test_results_that_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    held = [take(pool) for _ in range(200)]
    assert len({t.data_ptr() for t in held}) == 200
    assert pool.size_bytes <= recycled._MOST * held[0].untyped_storage().nbytes()


def test_without_the_count_nothing_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycled, "_references", None)
    pool = Pool()
    assert take(pool).shape == SHAPE and pool.size_bytes == 0


def test_threads() -> None:
    """What a thread holds is written by no other."""
    pool, wrong = Pool(), []

    def work(number: int) -> None:
        for turn in range(300):
            mine = [take(pool).fill_(number * 1000 + turn + k) for k in range(3)]
            wrong.extend(k for k, t in enumerate(mine) if not bool((t == number * 1000 + turn + k).all()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and pool.size_bytes <= 24 * take(pool).untyped_storage().nbytes()  # old ones and new


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_results_of_a_model(mode: Callable[[], Any]) -> None:
    """Memory comes back only when a result was dropped, a result that is kept never changes; counted and cleared."""
    model = net(lambda m, x: m[0](x), nn.Conv2d(3, 16, 1))
    gm, x, y = zendnn_cffi.optimize(model, tune="off"), noise(1, 3, 64, 64), noise(1, 3, 64, 64, seed=5)
    zendnn_cffi.cache_clear()
    with mode():
        first = gm(x)
        kept, pointer = first.clone(), first.data_ptr()
        second = gm(y)
        assert torch.equal(first, kept) and not torch.equal(second, kept)
        del first
        before = zendnn_cffi.cache_info().results_bytes
        assert before >= kept.nbytes
        third = gm(x)
    assert third.data_ptr() == pointer and torch.equal(third, kept)
    assert zendnn_cffi.cache_info().results_bytes < before
    del third
    zendnn_cffi.cache_clear()
    assert zendnn_cffi.cache_info().results_bytes == 0
