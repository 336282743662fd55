"""What is kept between calls: counted, bounded, given back."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from tests.support.lowering import net, noise
from zendnn_cffi.locks import making
from zendnn_cffi.runtime import arenas


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Nothing is left of other tests."""
    gc.collect()
    zendnn_cffi.cache_clear()
    yield
    zendnn_cffi.cache_clear()


def model() -> nn.Module:
    """Two convolutions that need an arena, and a fallback between them, whose call refers back to its context."""
    return net(
        lambda m, x: m[1](torch.cumsum(F.relu(m[0](x)), 1)),
        nn.Conv2d(3, 16, 3, padding=1),
        nn.Conv2d(16, 8, 3, padding=1),
    )


def plain() -> nn.Module:
    return net(lambda m, x: m[1](F.relu(m[0](x))), nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1))


def test_counts() -> None:
    before = zendnn_cffi.cache_info()
    gm = zendnn_cffi.optimize(plain(), tune="off")
    gm(noise(2, 3, 9, 9))
    info = zendnn_cffi.cache_info()
    assert info.regions == before.regions + 1
    assert info.programs == before.programs + 1
    assert info.arenas_bytes >= 2 * 16 * 81 * 4
    assert info.packed_weights_bytes >= 16 * 8 * 9 * 4
    parameters = sum(p.numel() * 4 for p in gm.parameters())
    assert info.original_weights_bytes - before.original_weights_bytes == parameters
    assert info.primitives_limit > 0
    assert "arenas limit" in str(info) and "MiB" in str(info)


def without_bias(gm: nn.Module) -> None:
    gm.get_submodule("0.0").bias = None  # type: ignore[assignment]


def without_parameters(gm: nn.Module) -> None:
    setattr(gm.get_submodule("0"), "0", nn.Identity())


def without_layer(gm: nn.Module) -> None:
    delattr(gm.get_submodule("0"), "0")


@pytest.mark.parametrize("replace", (without_bias, without_parameters, without_layer))
def test_what_was_replaced_counts_no_longer(replace: Callable[[nn.Module], None]) -> None:
    """The region still names a parameter that is gone, until the next call notices."""
    gm = zendnn_cffi.optimize(nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.ReLU()).eval(), tune="off")
    gm(noise(3, 8))
    before = zendnn_cffi.cache_info()
    replace(gm)
    info = zendnn_cffi.cache_info()
    gone = 8 * 4 if replace is without_bias else (8 + 8 * 8) * 4
    assert info.original_weights_bytes == before.original_weights_bytes - gone
    assert info.regions == before.regions


@pytest.mark.parametrize("make", (plain, model))
def test_fifty_batch_sizes_stay_within_the_bound(make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    net_ = make()  # type: ignore[operator]
    gm = zendnn_cffi.optimize(net_, tune="off")
    gm(noise(50, 3, 9, 9))
    largest = zendnn_cffi.cache_info().arenas_bytes
    limit = 2 * largest
    monkeypatch.setenv(arenas.LIMIT_VARIABLE, str(limit / (1 << 20)))
    for batch in range(1, 51):
        x = noise(batch, 3, 9, 9)
        with torch.no_grad(), zendnn_cffi.warm_up():
            torch.testing.assert_close(gm(x), net_(x), rtol=1e-4, atol=1e-4)
        info = zendnn_cffi.cache_info()
        assert info.arenas_bytes <= limit
        assert info.programs <= info.programs_limit * info.regions
    with torch.no_grad():  # what was dropped is made again
        torch.testing.assert_close(gm(noise(1, 3, 9, 9)), net_(noise(1, 3, 9, 9)), rtol=1e-4, atol=1e-4)


def test_sizes_that_wait_for_a_program_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    before = zendnn_cffi.cache_info()
    gm = zendnn_cffi.optimize(plain(), tune="off")
    monkeypatch.setattr(next(iter(gm.regions().values())).patience, "at_once", 2)
    for batch in (1, 2, 3, 4):
        gm(noise(batch, 3, 9, 9))
    info = zendnn_cffi.cache_info()
    assert (info.programs - before.programs, info.waiting - before.waiting) == (2, 2)
    assert any("runs 2 further input sizes as plain PyTorch" in note for note in zendnn_cffi.explain(gm).notes)
    zendnn_cffi.cache_clear()
    assert zendnn_cffi.cache_info().waiting == 0


def test_least_recently_used_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from fx_passes.region import programs

    monkeypatch.setattr(programs, "MAX_PROGRAMS", 2)
    gm = zendnn_cffi.optimize(plain(), tune="off")
    for batch in (1, 2, 1, 3):
        gm(noise(batch, 3, 9, 9))
    (only,) = gm.regions().values()
    assert [signature[1][0][0] for signature in only.lowered] == [1, 3]


def test_clear_gives_everything_back() -> None:
    before = zendnn_cffi.cache_info()
    net_ = model()
    gm = zendnn_cffi.optimize(net_, tune="off")
    expected = gm(noise(2, 3, 9, 9))
    assert zendnn_cffi.cache_info().arenas_bytes > before.arenas_bytes
    packed = zendnn_cffi.cache_info().packed_weights_bytes
    with making():  # modules of other tests are lowered anew by a thread, once they are not called
        zendnn_cffi.cache_clear()
        after = zendnn_cffi.cache_info()
    assert (after.programs, after.arenas_bytes) == (0, 0)
    assert after.packed_weights_bytes <= before.packed_weights_bytes < packed  # modules of other tests may hold some
    assert after.primitives_limit == before.primitives_limit
    assert torch.equal(gm(noise(2, 3, 9, 9)), expected)


def test_limit_of_zero_keeps_working(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(arenas.LIMIT_VARIABLE, "0")
    gm = zendnn_cffi.optimize(plain(), tune="off")
    first = gm(noise(2, 3, 9, 9))
    gm(noise(3, 3, 9, 9))
    assert torch.equal(gm(noise(2, 3, 9, 9)), first)


@pytest.mark.parametrize("value", ("", "many", "-1"))
def test_limit_that_is_no_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(arenas.LIMIT_VARIABLE, value)
    assert arenas.limit_bytes() == (arenas.DEFAULT_LIMIT_MB << 20 if value != "-1" else -(1 << 20))
