"""The regions of a call share the time to measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from fx_passes.region import call_time, variants
from fx_passes.region.call_time import SHARED, CallTime
from tests.support.lowering import net, noise


class Region:
    """Something that asks for time."""

    call_time: CallTime | None = None


def shared_by(count: int, **how: bool) -> tuple[CallTime, list[Any]]:
    regions: list[Any] = [Region() for _ in range(count)]
    time = CallTime(regions, **how)
    assert all(region.call_time is time for region in regions)
    return time, regions


@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_equal_parts_where_all_is_used(count: int) -> None:
    time, regions = shared_by(count)
    parts = []
    for region in regions:
        parts.append(time.share(region, 0.5))
        time.spend(parts[-1])
    assert parts == pytest.approx([min(0.5, SHARED * 0.5 / count)] * count)


def test_what_one_leaves_others_have() -> None:
    time, regions = shared_by(5)
    parts = []
    for region, spent in zip(regions, (0.0, 0.0, 1.0, 0.25, 0.0), strict=True):
        parts.append(time.share(region, 1.0))
        time.spend(spent)
    assert parts == pytest.approx([0.4, 0.5, 2 / 3, 0.5, 0.75])
    time.spend(9.0)
    assert time.share(regions[0], 1.0) == pytest.approx(0.4), "another call"
    time.spend(9.0)
    assert time.share(regions[1], 1.0) == 0.0


def test_regions_that_a_call_runs_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(call_time.time, "perf_counter", lambda: now[0])
    time, (first, second) = shared_by(2, once=False)
    assert time.share(first, 1.0) == 1.0
    time.spend(1.5)
    now[0] += 0.9
    assert time.share(first, 1.0) == pytest.approx(0.25), "for another size, in the same call"
    time.spend(0.5)
    now[0] += 1.1
    assert time.share(second, 1.0) == 1.0


def test_none_is_none() -> None:
    time, regions = shared_by(3)
    assert [time.share(region, 0.0) for region in regions] == [0.0] * 3


def three() -> nn.Module:
    """Three regions: PyTorch sorts between them."""
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    return net(lambda m, x: m[0][2](m[0][1](m[0][0](x).sort()[0]).sort()[0]), layers).eval()


def given(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that regions get from now on."""
    seconds: list[float] = []
    turn_of = variants.turn_of

    def noting(options: Any, *more: Any) -> Any:
        seconds.append(options.tune_seconds)
        return turn_of(options, *more)

    monkeypatch.setattr(variants, "turn_of", noting)
    return seconds


def test_a_call_of_several_regions(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fx_passes.search.turn.Turn.spent_seconds", 0.25)
    seconds, model, x = given(monkeypatch), three(), noise(4, 8)
    fast = zendnn_cffi.optimize(model, tune_seconds=0.6)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert seconds == pytest.approx([0.4, 0.475, 0.6])
    with torch.no_grad():
        fast(noise(6, 8))
    assert seconds[3:] == pytest.approx([0.4, 0.475, 0.6])
    zendnn_cffi.save(fast, tmp_path / "m.safetensors")
    seconds.clear()
    with torch.no_grad():
        zendnn_cffi.load(tmp_path / "m.safetensors")(noise(5, 8))
    assert seconds == pytest.approx([0.4, 0.475, 0.6])


@pytest.mark.parametrize("tune", ["off", "full"])
def test_other_ways_to_tune_have_no_limit(tune: str, monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    seconds = given(monkeypatch)
    with torch.no_grad():
        zendnn_cffi.optimize(three(), tune=tune, tune_seconds=0.25)(noise(4, 8))
    assert seconds == [0.25] * 3


def test_where_plain_pytorch_wins_its_time_was_spent_too(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fx_passes.search.turn.Turn.spent_seconds", 0.25)

    def refusing(*_: Any) -> Any:
        raise variants.NotLowered("plain PyTorch is faster here")

    monkeypatch.setattr(variants, "choose_variant", refusing)
    seconds = given(monkeypatch)
    with torch.no_grad():
        zendnn_cffi.optimize(three(), tune_seconds=0.6)(noise(4, 8))
    assert seconds == pytest.approx([0.4, 0.475, 0.6])


def test_what_is_known_leaves_its_part_to_others(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, fast, known = (
        noise(4, 8),
        zendnn_cffi.optimize(three(), tune_seconds=0.6),
        zendnn_cffi.optimize(three(), tune="off"),
    )
    with torch.no_grad():
        known(x)
    regions: list[Any] = [*fast.regions().values()]
    for region, other in list(zip(regions, known.regions().values(), strict=True))[:2]:
        (lowered,) = other.lowered.values()
        monkeypatch.setattr(region, "known", lambda *_, found=lowered: found)
    seconds = given(monkeypatch)
    with torch.no_grad():
        fast(x)
    assert seconds == [0.6]
