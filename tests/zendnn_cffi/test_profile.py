"""profile(): the time of every call, in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from tests.support.lowering import net, noise
from zendnn_cffi.profile import profile

X = noise(2, 3, 8, 8)


def made() -> Any:
    model = net(lambda m, x: m[1](F.relu(m[0](x))), nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1))
    return zendnn_cffi.optimize(model, tune="off")


def test_every_call_has_a_time() -> None:
    gm = made()
    found = profile(gm, X, runs=5)
    (lowered,) = next(iter(gm.regions().values())).lowered.values()
    assert [r.name for r in found.records] == [c.name for c in lowered.program.calls]
    assert all(r.time_ns > 0 and r.region == "zen_region_0" for r in found.records)
    convolutions = [r for r in found.records if r.kind == "convolution"]
    assert [r.flops for r in convolutions] == [2 * 2 * 16 * 36 * 27, 2 * 2 * 4 * 36 * 16]
    assert all(r.gflops > 0 and "avx" in r.implementation for r in convolutions)
    assert 0 < found.primitives_ns == sum(r.time_ns for r in found.records) and found.total_ns > 0


def test_text() -> None:
    text = str(profile(made(), X, runs=2))
    assert text.splitlines()[0].split() == ["call", "kind", "ms", "share", "GFLOP/s", "implementation"]
    assert "convolution" in text and text.splitlines()[-1].startswith("total ")


def test_results_are_the_same_while_profiling_and_it_ends() -> None:
    gm = made()
    before = gm(X)
    profile(gm, X, runs=2)
    assert torch.equal(gm(X), before)
    assert all(region.on_run is None for region in gm.regions().values())


def test_it_ends_after_an_error_too() -> None:
    gm = made()
    with pytest.raises(RuntimeError):
        profile(gm, X[:, :2])
    assert all(region.on_run is None for region in gm.regions().values())


def test_a_module_without_regions() -> None:
    found = profile(zendnn_cffi.optimize(nn.Identity().eval()), X, runs=1)
    assert found.records == [] and "total" in str(found)


def test_refusals() -> None:
    with pytest.raises(TypeError, match=r"profile\(\) takes what"):
        profile(nn.Conv2d(3, 4, 1), X)
    with pytest.raises(ValueError, match="runs must be at least 1"):
        profile(made(), X, runs=0)
