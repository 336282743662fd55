"""Slices of the batch and plain PyTorch beside the whole program: right, and chosen by what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from fx_passes.region import compile as compile_module
from fx_passes.region import variants
from fx_passes.search import disturbance
from fx_passes.search.tuner import database_for
from fx_passes.search.turn import Turn
from tests.support.lowering import net, noise
from tests.tolerance import assert_close
from zendnn_cffi.runtime.program import Program
from zendnn_cffi.runtime.sliced_program import SlicedProgram

CONV = nn.Conv2d(3, 16, 3, padding=1)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing measured yet, and slices of everything: two samples fit the first cache, four the second.

    The machine seems quiet, and time does not run out, whatever else runs.
    """
    monkeypatch.setattr(disturbance, "involuntary_switches", int)
    monkeypatch.setattr(Turn, "spent_seconds", 0.0)
    monkeypatch.setenv("ZENDNN_CFFI_CACHE", str(tmp_path))
    monkeypatch.setattr(variants, "_LARGE_BYTES", 0)
    monkeypatch.setattr(variants, "_CACHES_BYTES", (2 * 16 * 64 * 4, 4 * 16 * 64 * 4))
    database_for.cache_clear()
    yield
    database_for.cache_clear()


def prefer(monkeypatch: pytest.MonkeyPatch, favourite: str) -> list[list[str]]:
    """Make one variant the fastest; return the names of those measured, per measurement."""
    seen: list[list[str]] = []

    def measured(runs: Mapping[str, Any], inputs: Any) -> dict[str, float]:
        seen.append(list(runs))
        for run in runs.values():
            run(inputs)
        return {name: 1.0 if name == favourite else 1e6 for name in runs}

    monkeypatch.setattr(variants, "measure_in_turns", measured)
    return seen


def lowered(gm: Any) -> Any:
    (region,) = gm.regions().values()
    (only,) = region.lowered.values()
    return only


BATCHWISE = {
    "convolution": lambda m, x: F.relu(m[0](x)),
    "residual": lambda m, x: F.relu(m[0](x)) + m[0](x),
    "two outputs": lambda m, x: (m[0](x), m[0](x).mean((2, 3))),
    "concatenation": lambda m, x: torch.cat([m[0](x), x], 1),
    "chunk": lambda m, x: (lambda p: p[0] * torch.sigmoid(p[1]))(m[0](x).chunk(2, 1)),
    "flatten": lambda m, x: torch.flatten(F.max_pool2d(m[0](x), 2), 1),
    "softmax": lambda m, x: torch.softmax(m[0](x), -1),
    "views": lambda m, x: m[0](x).view(x.size(0), 4, 4, 64).transpose(1, 2).reshape(x.size(0), 16, 8, 8) * 2,
}
MIXING = {
    "softmax over the batch": lambda m, x: torch.softmax(m[0](x), 0),
    "mean over the batch": lambda m, x: m[0](x).mean(0, keepdim=True) + m[0](x),
    "one sample for all": lambda m, x: m[0](x)[:1] + m[0](x),
    "batch and channels": lambda m, x: m[0](x).transpose(0, 1) * 2,
    "a shape with the batch in it": lambda m, x: m[0](x).reshape(8, 16, 64) * 2,
    "the batch in a shape on the way": lambda m, x: torch.softmax(m[0](x).reshape(8, -1), 1).reshape(-1, 16, 8, 8),
    "another size that is as large": lambda m, x: torch.softmax(m[0](x).reshape(x.size(2), -1), 1).reshape(
        -1, 16, 8, 8
    ),
    "divided by the batch": lambda m, x: torch.softmax(m[0](x) / x.size(0), 1),
    "scaled by the batch": lambda m, x: F.relu(m[0](x)) * (x.size(0) * 0.25),
    "samples joined": lambda m, x: m[0](x).reshape(4, -1) * 2,
    "batch concatenated": lambda m, x: torch.cat([m[0](x), m[0](x)], 0),
    "products of samples": lambda m, x: (lambda f: f @ f.transpose(0, 1))(m[0](x).flatten(1)),
    "rolled": lambda m, x: torch.cat([m[0](x)[4:], m[0](x)[:4]], 0) + m[0](x),
}


@pytest.mark.parametrize(
    ("name", "memory_format"),
    [(name, torch.contiguous_format) for name in BATCHWISE] + [("residual", torch.channels_last)],
    ids=str,
)
def test_slices_give_the_same(name: str, memory_format: torch.memory_format, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = prefer(monkeypatch, "2")
    model, x = net(BATCHWISE[name], CONV), noise(8, 3, 8, 8).contiguous(memory_format=memory_format)
    gm = zendnn_cffi.optimize(model)
    ours, theirs = gm(x), model(x)
    for a, b in zip(*((r,) if isinstance(r, torch.Tensor) else r for r in (ours, theirs)), strict=True):
        assert_close(a, b.detach(), k=27)
        assert a.stride() == b.stride() or not b.is_contiguous()
    if "2" in seen[0]:
        assert isinstance(lowered(gm).program, SlicedProgram) and lowered(gm).program.slices == 4
    assert "2" in seen[0] or name in ("chunk", "views"), seen


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_samples_is_not_sliced(name: str, monkeypatch: pytest.MonkeyPatch, recwarn: Any) -> None:
    prefer(monkeypatch, "2")
    model, x = net(MIXING[name], CONV), noise(8, 3, 8, 8)
    gm = zendnn_cffi.optimize(model)
    assert_close(gm(x), model(x).detach(), k=1024)
    assert isinstance(lowered(gm).program, Program)
    assert not [w for w in recwarn if "could not be lowered" in str(w.message)]


def test_plain_pytorch_gets_the_region_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = prefer(monkeypatch, variants.PLAIN)
    model, x = net(BATCHWISE["residual"], CONV), noise(8, 3, 8, 8)
    gm = zendnn_cffi.optimize(model)
    assert torch.equal(gm(x), model(x))
    assert lowered(gm) is None
    assert all("plain PyTorch is faster here" in node.reason for node in zendnn_cffi.explain(gm).nodes)
    again = zendnn_cffi.optimize(model)
    again(x)
    assert len(seen) == 1 and lowered(again) is None, "remembered"


@pytest.mark.parametrize("tune", ("auto", "full"))
def test_beside_other_work_plain_pytorch_does_not_win_for_good(tune: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, switches = prefer(monkeypatch, variants.PLAIN), [0]
    measured = variants.measure_in_turns

    def disturbed(*args: Any) -> dict[str, float]:
        switches[0] += 10**6
        return measured(*args)

    monkeypatch.setattr(disturbance, "involuntary_switches", lambda: switches[0])
    monkeypatch.setattr(variants, "measure_in_turns", disturbed)
    gm, x = zendnn_cffi.optimize(net(BATCHWISE["residual"], CONV), tune=tune), noise(8, 3, 8, 8)
    gm(x)
    (region,) = gm.regions().values()
    assert (lowered(gm) is None) is (tune == "full")
    assert region.is_provisional is (tune == "auto")
    if tune == "auto":
        monkeypatch.setattr(variants, "measure_in_turns", measured)
        assert region.improve(lambda: False) and lowered(gm) is None
    assert len(seen) == (2 if tune == "auto" else 1)


@pytest.mark.parametrize("long", (True, False))
def test_further_sizes_are_compared_with_plain_pytorch_where_that_is_soon_done(
    long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one always is: a region that never was might be slower."""
    seen = prefer(monkeypatch, variants.WHOLE)
    real = variants.lower_region

    def lower(*arguments: Any, **named: Any) -> Any:
        return replace(real(*arguments, **named), alone_ns=1e9 if long else 1e6)

    monkeypatch.setattr(variants, "lower_region", lower)
    model = net(lambda m, x: F.relu(m[0](x)), nn.Linear(16, 24))
    gm: Any = zendnn_cffi.optimize(model)
    (region,) = gm.regions().values()
    with torch.no_grad():
        for rows in (3, 5, 7, 9):
            assert_close(gm(noise(rows, 16)), model(noise(rows, 16)), k=16)
            assert region.is_provisional == (long and rows > 3)
    assert len(seen) == (1 if long else 3) and all(variants.PLAIN in names for names in seen)
    assert all(region.lowered.values()) and len(region.lowered) == 4


def test_equal_graphs_of_other_widths_are_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = prefer(monkeypatch, variants.WHOLE)
    for width in (16, 32):
        zendnn_cffi.optimize(net(BATCHWISE["convolution"], nn.Conv2d(3, width, 3, padding=1)))(noise(8, 3, 8, 8))
    assert len(seen) == 2


def test_off_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = prefer(monkeypatch, variants.PLAIN)
    gm = zendnn_cffi.optimize(net(BATCHWISE["convolution"], CONV), tune="off")
    gm(noise(8, 3, 8, 8))
    assert not seen and isinstance(lowered(gm).program, Program)


def test_times_are_positive_and_wrong_slices_never_run() -> None:
    """Really measured."""
    model, x = net(BATCHWISE["two outputs"], CONV), noise(8, 3, 8, 8)
    gm = zendnn_cffi.optimize(model, tune="full")
    for ours, theirs in zip(gm(x), model(x), strict=True):
        assert_close(ours, theirs.detach(), k=64)


def large_batches(monkeypatch: pytest.MonkeyPatch, samples: int = 3) -> None:
    """Two samples fit the caches, and more than `samples` are enough for a slice."""
    monkeypatch.setattr(variants, "_CACHES_BYTES", (2 * 16 * 64 * 4, 2 * 16 * 64 * 4))
    monkeypatch.setattr(variants, "_ENOUGH_BYTES", samples * 16 * 64 * 4 // torch.get_num_threads())


@pytest.mark.parametrize(
    ("batch", "names"), [(1, ["whole"]), (4, ["whole", "2"]), (8, ["2", "4"]), (12, ["2", "4"]), (13, ["whole", "1"])]
)
def test_a_batch_beyond_what_is_enough_is_not_tried_whole(
    batch: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    large_batches(monkeypatch)
    seen = prefer(monkeypatch, names[-1])
    model, x = net(BATCHWISE["residual"], CONV), noise(batch, 3, 8, 8)
    gm = zendnn_cffi.optimize(model)
    assert_close(gm(x), model(x).detach(), k=27)
    assert seen == [[*names, variants.PLAIN]]
    assert lowered(gm).program.slices == (1 if names[-1] == "whole" else batch // int(names[-1]))


def test_large_weights_want_large_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slice reads all of them: with eight samples here, activations are twice as many bytes."""
    large_batches(monkeypatch)
    seen = prefer(monkeypatch, variants.PLAIN)
    model = net(lambda m, x: m[1](m[0](x).flatten(1)), nn.Conv2d(3, 16, 3, padding=1), nn.Linear(1024, 8))
    for batch in (8, 32):
        zendnn_cffi.optimize(model)(noise(batch, 3, 8, 8))
    assert seen == [["whole", "2", variants.PLAIN], ["2", "8", variants.PLAIN]]


def test_slices_of_a_huge_batch_that_fail_leave_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    large_batches(monkeypatch)
    seen = prefer(monkeypatch, variants.WHOLE)

    def refuse(*_: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(variants, "sliced", refuse)
    model, x = net(BATCHWISE["residual"], CONV), noise(8, 3, 8, 8)
    for _ in range(2):  # measured, then remembered
        gm = zendnn_cffi.optimize(model)
        assert_close(gm(x), model(x).detach(), k=27)
        assert isinstance(lowered(gm).program, Program)
    assert seen == [["whole", variants.PLAIN]]


def test_only_the_winner_is_refined(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, "2")
    refined: list[int] = []
    refine = compile_module.refine

    def noted(operations: Any, choice: Any, inputs: Any, *rest: Any) -> Any:
        refined.append(inputs[0].shape[0])
        return refine(operations, choice, inputs, *rest)

    monkeypatch.setattr(compile_module, "refine", noted)
    model, x = net(BATCHWISE["residual"], CONV), noise(8, 3, 8, 8)
    assert_close(zendnn_cffi.optimize(model)(x), model(x).detach(), k=27)
    assert refined == [2]


class Clock:
    """Runs of known times: each call takes the next of its times, the last one for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        monkeypatch.setattr(variants.time, "perf_counter_ns", lambda: self.now_ns)
        monkeypatch.setattr(variants.time, "perf_counter", lambda: self.now_ns / 1e9)
        self.calls: list[str] = []

    def run(self, name: str, *seconds: float) -> Any:
        left = list(seconds)

        def call(_: Any) -> None:
            self.calls.append(name)
            self.now_ns += int((left.pop(0) if len(left) > 1 else left[0]) * 1e9)

        return call


def test_what_falls_far_behind_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    runs = {"whole": clock.run("whole", 0.3, 0.2), "2": clock.run("2", 0.3, 0.1), "plain": clock.run("plain", 2.0)}
    times = variants.measure_in_turns(runs, ())
    assert times == {"whole": 0.2e9, "2": 0.1e9, "plain": 2.0e9}
    assert clock.calls.count("plain") == 1 and clock.calls.count("whole") == 2 and clock.calls.count("2") > 3


def test_short_runs_are_all_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    runs = {"whole": clock.run("whole", 0.05, 0.01), "plain": clock.run("plain", 0.4, 0.04, 0.005)}
    times = variants.measure_in_turns(runs, ())
    assert times == {"whole": 0.01e9, "plain": 0.01e9}, "faster in some rounds is not faster"
    assert clock.calls.count("plain") == clock.calls.count("whole") == 8


def test_plain_pytorch_that_is_always_faster_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    runs = {"whole": clock.run("whole", 0.9), "plain": clock.run("plain", 0.5, 0.4)}
    assert variants.measure_in_turns(runs, ()) == {"whole": 0.9e9, "plain": 0.4e9}
