"""Buffers written by `self.n += 1` are written by the graph; buffers that another tensor replaces are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.pipeline import compile_graph
from tests.support.lowering import noise


class Counts(nn.Module):
    """A layer beside buffers; `step` is what a forward does with them."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4)
        self.inner = nn.Module()
        self.inner.register_buffer("n", torch.ones(()))
        self.register_buffer("n", torch.ones(()))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("ring", torch.zeros(3, 4))
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, torch.relu(self.layer(x)))


def adds(m: Any, y: Tensor) -> Tensor:
    m.n += 1
    return y * m.n


def every_operator(m: Any, y: Tensor) -> Tensor:
    m.n += y.mean()
    m.n -= 0.25
    m.n *= 0.5
    m.n /= 0.75
    return y + m.n


def is_read_before_and_after(m: Any, y: Tensor) -> Tensor:
    before, product = m.n, m.n * y
    m.n += 1
    return product + before * 10 + m.n * 100  # before is the buffer, too


def keeps_a_ring(m: Any, y: Tensor) -> Tensor:
    m.ring[m.place % 3] = y.mean(0)
    m.place += 1
    return y - m.ring.mean(0)


def of_a_module_inside(m: Any, y: Tensor) -> Tensor:
    m.inner.n *= 2
    return y * m.inner.n


WRITES = {f.__name__: f for f in (adds, every_operator, is_read_before_and_after, keeps_a_ring, of_a_module_inside)}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("has_example", [True, False])
def test_the_graph_writes(name: str, has_example: bool, tmp_path: Path) -> None:
    x = noise(5, 6)
    model = Counts(WRITES[name]).eval()
    fast: Any = zendnn_cffi.optimize(copy.deepcopy(model), (x,) if has_example else None, tune="off")
    assert not fast.leaves and len(fast.regions()) >= 1

    def compare(module: Any, calls: int) -> None:
        for seed in range(calls):
            torch.testing.assert_close(module(noise(5, 6, seed=seed)), model(noise(5, 6, seed=seed)))
            torch.testing.assert_close(dict(module.named_buffers()), dict(model.named_buffers()))

    with torch.no_grad():
        compare(fast, 3)
        zendnn_cffi.save(fast, tmp_path / "m")
        compare(zendnn_cffi.load(tmp_path / "m"), 3)


def replaces(m: Any, y: Tensor) -> Tensor:
    m.n = m.n + 1
    return y * m.n


def adds_and_replaces(m: Any, y: Tensor) -> Tensor:
    m.n += 1
    m.n = m.n * 2
    return y * m.n


def exchanges(m: Any, y: Tensor) -> Tensor:
    n = m.inner.n
    n += 1
    m.n = n  # another buffer
    return y * m.n


@pytest.mark.parametrize("step", [replaces, adds_and_replaces, exchanges])
def test_what_replaces_a_buffer_is_no_graph(step: Callable[[Any, Tensor], Tensor]) -> None:
    model, x = Counts(step).eval(), noise(5, 6)
    gm: Any = compile_graph(copy.deepcopy(model))
    assert "its forward changes self.n" in gm.leaves[""]
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(gm(x), model(x))
            torch.testing.assert_close(dict(gm.named_buffers()), dict(model.named_buffers()))
