"""Which input sizes get a program at once, which ones later, and what runs until then."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zendnn_cffi
from fx_passes.region import patience as module
from fx_passes.region.patience import AT_ONCE, TO_REPLACE, Patience, warm_up
from fx_passes.region.region import ZenRegion
from tests.support.lowering import net, noise


def made() -> tuple[Any, ZenRegion, nn.Module]:
    """A module, its region, and what it computes."""
    model = net(lambda m, x: torch.relu(m[0](x)), nn.Linear(16, 32))
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    (region,) = fast.regions().values()
    return fast, region, model


def has_program(region: ZenRegion, batch: int) -> bool:
    return any(signature[1][0][0] == batch for signature in region.lowered)


class Clock:
    """Time that passes while something runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module, "time", self)

    def perf_counter(self) -> float:
        return self.now

    def run_for(self, seconds: float) -> Any:
        def run(inputs: Any) -> Any:
            self.now += seconds
            return inputs

        return run


def full(gain: float | None = None, price_s: float = 1.0) -> Patience:
    """One that has lowered as many as it does at once."""
    patience = Patience()
    for number in range(AT_ONCE):
        assert not patience.lets_wait(number, False)
        patience.note_lowered(number, price_s, gain, False)
    return patience


@given(st.floats(0.1, 1.0), st.floats(0.01, 10.0), st.floats(0.001, 1.0), st.booleans())
def test_plain_pytorch_runs_until_a_program_would_have_paid(
    gain: float, price: float, call: float, full_: bool
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock = Clock(monkeypatch)
        patience, calls = full(gain, price), 0
        while patience.lets_wait("new", full_) and calls < 10_000:
            patience.run("new", clock.run_for(call), ())
            calls += 1
        saved = calls * call * gain / (TO_REPLACE if full_ else 1.0)
        assert saved >= 0.99 * price or calls == 10_000
        assert saved - call * gain < 1.01 * price


def test_programs_that_go_round_take_ever_longer_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, patience = Clock(monkeypatch), full(1.0)
    for turn in range(3):
        patience.run("new", clock.run_for(0.9 * TO_REPLACE * 2**turn), ())
        assert patience.lets_wait("new", True) and not patience.lets_wait("new", False)
        patience.run("new", clock.run_for(0.2 * TO_REPLACE * 2**turn), ())
        assert not patience.lets_wait("new", True)
        for number in range(module.PER_TURN):
            patience.note_lowered("new" if number == 0 else (turn, number), 1.0, None, True)


def test_a_hiccup_is_not_taken_for_the_price(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, patience = Clock(monkeypatch), full(1.0)
    patience.note_lowered("while something else ran", 60.0, None, False)
    patience.run("new", clock.run_for(1.1), ())
    assert not patience.lets_wait("new", False)


def test_what_a_program_saves_is_known_where_it_was_measured() -> None:
    assert full(None).gain == module.SURELY
    assert full(0.8).gain == 0.8
    assert full(-0.2).gain == 0.1, "it was no faster there: what shall be saved is little, but something"


def test_each_size_waits_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, patience = Clock(monkeypatch), full(1.0)
    patience.run("a", clock.run_for(2.0), ())
    patience.run("b", clock.run_for(0.5), ())
    assert not patience.lets_wait("a", False) and patience.lets_wait("a", True)
    assert patience.lets_wait("b", False) and patience.waiting == 2
    patience.note_lowered("a", 1.0, None, False)
    assert patience.waiting == 1
    patience.clear()
    assert patience.waiting == 0 and not patience.lets_wait("b", False)


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 10)
    clock, patience = Clock(monkeypatch), full()
    for number in range(100, 150):
        patience.run(number, clock.run_for(0.1), ())
    assert patience.waiting == 10


def test_the_first_sizes_are_lowered_at_once_further_ones_by_need() -> None:
    fast, region, model = made()
    with torch.no_grad():
        for batch in range(1, AT_ONCE + 5):
            torch.testing.assert_close(fast(noise(batch, 16)), model(noise(batch, 16)))
    assert [has_program(region, batch) for batch in range(1, AT_ONCE + 5)] == [True] * AT_ONCE + [False] * 4
    last = noise(AT_ONCE + 4, 16)
    with torch.no_grad():
        for _ in range(100_000):
            fast(last)
            if has_program(region, AT_ONCE + 4):
                break
        torch.testing.assert_close(fast(last), model(last))
    assert has_program(region, AT_ONCE + 4) and not has_program(region, AT_ONCE + 3)
    assert region.patience.waiting == 3


def test_gradients_flow_where_a_size_waits() -> None:
    fast, region, model = made()
    region.patience.at_once = 1
    with torch.no_grad():
        fast(noise(1, 16))
    x = noise(3, 16)
    x.requires_grad_(True)
    fast(x).sum().backward()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(x.grad, expected)
    with torch.no_grad():
        assert not fast(x.detach()).requires_grad
    assert not has_program(region, 3)


def test_warm_up_makes_programs_at_once_in_this_thread_alone() -> None:
    fast, region, _ = made()
    region.patience.at_once = 1
    inside, outside = threading.Event(), threading.Event()

    def call() -> None:
        inside.wait()
        with torch.no_grad():
            fast(noise(7, 16))
        outside.set()

    other = threading.Thread(target=call)
    other.start()
    with torch.no_grad(), warm_up():
        for batch in (1, 2, 3):
            fast(noise(batch, 16))
        inside.set()
        outside.wait()
    other.join()
    with torch.no_grad():
        fast(noise(4, 16))
    assert [batch for batch in range(1, 9) if has_program(region, batch)] == [1, 2, 3]
    with pytest.raises(RuntimeError, match="stop"), warm_up():
        raise RuntimeError("stop")
    assert region.patience.lets_wait("new", False)


def test_full_measures_whatever_comes() -> None:
    model = net(lambda m, x: torch.relu(m[0](x)), nn.Linear(16, 32))
    fast: Any = zendnn_cffi.optimize(model, tune="full")
    (region,) = fast.regions().values()
    region.patience.at_once = 1
    with torch.no_grad():
        fast(noise(1, 16)), fast(noise(2, 16))
    assert len(region.lowered) == 2


def test_a_file_has_a_program_for_each_size_that_warmed_up(tmp_path: Path) -> None:
    fast, region, model = made()
    region.patience.at_once = 1
    with torch.no_grad(), warm_up():
        for batch in (1, 2, 3, 4):
            fast(noise(batch, 16))
    zendnn_cffi.save(fast, tmp_path / "model.zen")
    loaded: Any = zendnn_cffi.load(tmp_path / "model.zen")
    (again,) = loaded.regions().values()
    again.patience.at_once = 1
    with torch.no_grad():
        for batch in (4, 3, 2, 5):
            torch.testing.assert_close(loaded(noise(batch, 16)), model(noise(batch, 16)))
    assert [has_program(again, batch) for batch in (2, 3, 4, 5)] == [True, True, True, False]


def test_released_weights_never_wait() -> None:
    """Plain PyTorch would unpack them all."""
    model = net(lambda m, x: torch.relu(m[0](x)), nn.Linear(16, 32))
    fast: Any = zendnn_cffi.optimize(model, tune="off", release_weights=True)
    with torch.no_grad():
        fast(noise(2, 16))
        (region,) = fast.regions().values()
        region.patience.at_once = 1
        fast(noise(3, 16))
    assert has_program(region, 3)


def test_torch_compile_lets_sizes_wait_as_well() -> None:
    """Where it captured one graph for all of them."""
    model = net(lambda m, x: torch.relu(m[0](x)), nn.Linear(16, 32))
    before = set(map(id, zendnn_cffi.backend.compiled_modules()))
    fast = torch.compile(model, backend="zendnn", dynamic=True, options={"tune": "off"})
    with torch.no_grad():
        for batch in range(2, AT_ONCE + 6):
            torch.testing.assert_close(fast(noise(batch, 16)), model(noise(batch, 16)))
    regions = [
        region
        for compiled in zendnn_cffi.backend.compiled_modules()
        if id(compiled) not in before
        for region in compiled.regions().values()
    ]
    assert [(len(region.lowered), region.patience.waiting) for region in regions] == [(AT_ONCE, 4)]
