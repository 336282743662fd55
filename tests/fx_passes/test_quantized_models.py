"""A quantized network through every way in, and through what may happen to an optimized module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from tests.support.lowering import noise
from tests.support.quantized import Weight, kept, ran, real, through

U8 = torch.uint8


class Block(nn.Module):
    """A stem, a residual block and a classifier, all of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = Weight(16, 3, 3, 3), Weight(16, 16, 1, 1), Weight(16, 16, 3, 3)
        self.classifier = Weight(10, 16)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        q = kept(F.relu(F.conv2d(through(x, 0.03, 128), self.stem(), self.stem.bias, padding=1)), 0.02)
        y = through(F.relu(F.conv2d(real(q, 0.02), self.first(), self.first.bias)), 0.02)
        y = F.conv2d(y, self.second(), self.second.bias, padding=1) + real(q, 0.02)
        y = F.adaptive_avg_pool2d(through(F.relu(y), 0.03), 1)
        return F.linear(through(through(y, 0.03).flatten(1), 0.03), self.classifier(), self.classifier.bias)


X = noise(2, 3, 9, 8)
STEP = 0.03 * 0.75  # of the last product: its source's scale times the largest weight


def compiled(model: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="zendnn", options={"tune": "off"})


WAYS_IN: dict[str, Callable[[nn.Module], Any]] = {
    "traced": lambda m: zendnn_cffi.optimize(m, tune="off"),
    "exported": lambda m: zendnn_cffi.optimize(m, (X,), tune="off"),
    "ExportedProgram": lambda m: zendnn_cffi.optimize(torch.export.export(m, (X,)), tune="off"),
    "its module": lambda m: zendnn_cffi.optimize(torch.export.export(m, (X,)).module(), tune="off"),
    "measured": lambda m: zendnn_cffi.optimize(m, (X,), tune="full"),
}


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("way", WAYS_IN)
def test_all_of_it_runs_on_integers(way: str) -> None:
    model = Block()
    with torch.no_grad():
        fast = WAYS_IN[way](model)
        torch.testing.assert_close(fast(X), model(X), atol=2 * STEP, rtol=0)
    if way != "measured":  # by time, small layers may be anything
        assert [source for _, source, _ in ran(fast)] == [U8] * 5


def test_torch_compile_runs_it_in_one_region() -> None:
    model = Block()
    with torch.no_grad():
        fast = compiled(model)
        torch.testing.assert_close(fast(X), model(X), atol=2 * STEP, rtol=0)


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_another_shape_and_dtype(dtype: torch.dtype | None) -> None:
    model = Block()
    fast = zendnn_cffi.optimize(model, (X,), tune="off", dtype=dtype)
    with torch.no_grad():
        for x in (X, noise(1, 3, 12, 5)):
            bound = 0.02 if dtype is not None else 0.0
            torch.testing.assert_close(fast(x), model(x), atol=2 * STEP + bound, rtol=0)
    assert {source for _, source, _ in ran(fast)} == {U8}


def test_a_copy_runs_on_integers() -> None:
    fast = zendnn_cffi.optimize(Block(), (X,), tune="off")
    with torch.no_grad():
        expected = fast(X)
        other = copy.deepcopy(fast)
        assert torch.equal(other(X), expected)
    assert ran(other) == ran(fast)


@pytest.mark.needs("vnni")
def test_other_weights_are_packed_again() -> None:
    model = Block()
    fast = zendnn_cffi.optimize(model, (X,), tune="off")
    with torch.no_grad():
        fast(X)
        state = model.state_dict()
        state = {name: value.clone() for name, value in state.items()}
        state["second.integers"] = -state["second.integers"]
        state["first.scales"] *= 2
        fast.load_state_dict(state)
        other = Block()
        other.load_state_dict(state)
        for _ in range(3):
            torch.testing.assert_close(fast(X), other(X), atol=2 * STEP, rtol=0)
    assert {source for _, source, _ in ran(fast)} == {U8}


@pytest.mark.needs("vnni")
def test_released_weights_stay_integers() -> None:
    model = Block()
    with torch.no_grad():
        expected = model(X)
        fast = zendnn_cffi.optimize(model, (X,), tune="off", release_weights=True)
        torch.testing.assert_close(fast(X), expected, atol=2 * STEP, rtol=0)
        other = noise(1, 3, 12, 5)
        torch.testing.assert_close(fast(other), Block()(other), atol=2 * STEP, rtol=0)
    (region,) = fast.regions().values()
    assert {t.dtype for t in region.originals if t.ndim > 1} <= {torch.int8}
    assert {source for _, source, _ in ran(fast)} == {U8}


@pytest.mark.needs("vnni")
def test_a_saved_module_computes_the_same_integers(tmp_path: Path) -> None:
    fast = zendnn_cffi.optimize(torch.export.export(Block(), (X,)), tune="off")
    with torch.no_grad():
        expected = fast(X)
        zendnn_cffi.save(fast, tmp_path / "block")
        loaded = zendnn_cffi.load(tmp_path / "block")
        assert torch.equal(loaded(X), expected)
    assert ran(loaded) == ran(fast) and {source for _, source, _ in ran(loaded)} == {U8}
