"""The selective scan by primitives, against float64."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zendnn_cffi
from fx_passes import ops
from fx_passes.ops.recurrent import state_offset
from tests.fx_passes.fuse.test_selective_scans import NUMBERS, WIDTH, Scanning, in_time, with_state
from tests.support.lowering import noise
from tests.support.made_up_times import prefer
from tests.tolerance import assert_close
from zendnn_cffi.runtime.loop_call import LoopCall


@pytest.fixture
def by_steps(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    prefer(monkeypatch, lambda candidate: candidate.implementation == "steps brg:avx512_core")


def loops(fast: Any) -> int:
    """How many loops over primitives all programs have: one for each sample."""
    programs = [found.program for region in fast.regions().values() for found in region.lowered.values() if found]
    return sum(isinstance(call, LoopCall) for program in programs for call in program.calls)


def optimized(model: nn.Module, x: Tensor, samples: int) -> Any:
    """The module, whose scan was computed by steps and is right, in two calls."""
    fast = zendnn_cffi.optimize(model, (x,), tune="full")
    k = 64 * x.shape[1]
    with torch.no_grad():
        for seed in range(2):
            given = noise(*x.shape, seed=seed)
            found, expected = (pytree.tree_leaves(each) for each in (fast(given), model.double()(given.double())))
            for actual, wanted in zip(found, expected, strict=True):
                assert_close(actual, wanted, k=k)
                assert actual.stride() == wanted.stride()
            model.float()
    assert loops(fast) == samples, zendnn_cffi.explain(fast)
    return fast


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("steps", [3, 17])
def test_scans(samples: int, steps: int, by_steps: None) -> None:
    optimized(Scanning(in_time), noise(samples, steps, WIDTH), samples)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("steps", [3, 17])
def test_scans_whose_last_state_is_read(samples: int, steps: int, by_steps: None) -> None:
    fast = optimized(Scanning(with_state), noise(samples, steps, WIDTH), samples)
    rows = str(zendnn_cffi.explain(fast))
    assert "torch:" not in rows and "steps" in rows


def test_bfloat16_regions_scan_in_float32(by_steps: None) -> None:
    """Errors, against float64, are those of eager PyTorch in bfloat16 or less."""
    model, x = Scanning(in_time), noise(2, 9, WIDTH)
    fast = zendnn_cffi.optimize(model, (x,), tune="full", dtype=torch.bfloat16)
    with torch.no_grad():
        found, expected = fast(x), copy.deepcopy(model).double()(x.double())
        eager = copy.deepcopy(model).bfloat16()(x.bfloat16())
    assert float((found - expected).abs().max()) <= 1.5 * float((eager - expected).abs().max())
    assert loops(fast) == 2


def test_saved_files_have_it(by_steps: None, tmp_path: Path) -> None:
    x = noise(1, 6, WIDTH)
    fast = optimized(Scanning(in_time), x, 1)
    zendnn_cffi.save(fast, tmp_path / "scan.safetensors")
    loaded = zendnn_cffi.load(tmp_path / "scan.safetensors")
    with torch.no_grad():
        assert torch.equal(loaded(x), fast(x))
    assert loops(loaded) == 1


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.integers(0, 99))
def test_the_body_is_the_recurrence(
    samples: int, width: int, steps: int, numbers: int, with_state: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    delta, drive = torch.rand(2, samples, width, steps, dtype=torch.float64)
    b, c = torch.randn(2, samples, steps, numbers, dtype=torch.float64)
    a = -torch.rand(width, numbers, dtype=torch.float64)
    state = torch.randn(samples, width, numbers, dtype=torch.float64) if with_state else None
    found = ops.selective_scan(delta, a, drive, b, c, state)
    both = ops.selective_scan(delta, a, drive, b, c, state, with_state=True)
    assert torch.equal(both[: found.numel()].view(samples, steps, width).transpose(1, 2), found)
    now = torch.zeros(samples, width, numbers, dtype=torch.float64) if state is None else state
    for step in range(steps):
        now = torch.exp(delta[:, :, step, None] * a) * now + drive[:, :, step, None] * b[:, None, step]
        torch.testing.assert_close(found[:, :, step], torch.einsum("bdn,bn->bd", now, c[:, step]))
    last = both[state_offset(found.numel()) :].view(samples, numbers, width).transpose(1, 2)
    torch.testing.assert_close(last, now)


def test_large_steps_forget_what_was(by_steps: None) -> None:
    """exp of numbers far below zero is zero, and no state is anything else."""
    model = Scanning(in_time)
    with torch.no_grad():
        model.project.bias[:WIDTH] = 300.0
        model.log_a.fill_(3.0)
    optimized(model, noise(1, 4, WIDTH), 1)
    assert model.log_a.shape == (WIDTH, NUMBERS)
