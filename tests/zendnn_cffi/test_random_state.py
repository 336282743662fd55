"""Random number generators are left as eager PyTorch would leave them: by optimize(), first calls, and tuning."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from tests.support.exported import needs_export


class Net(nn.Module):
    """Two layers, and a branch that torch.fx cannot trace where asked for; noise where asked for."""

    def __init__(self, branches: bool, draws: bool) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)
        self.branches, self.draws = branches, draws

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        if self.branches and needs_export(x) and x.shape[-1] > 100:
            x = x * 2
        if self.draws:
            x = x + torch.rand_like(x)
        result: Tensor = self.linear(x.mean((2, 3)))
        return result


def states() -> tuple[Any, ...]:
    torch_state, numpy_state = torch.get_rng_state().tolist(), np.random.get_state()
    return torch_state, random.getstate(), [str(part) for part in numpy_state]


ENTRIES: dict[str, Callable[[nn.Module, Tensor, str], Any]] = {
    "optimize": lambda model, x, tune: zendnn_cffi.optimize(model, tune=tune),
    "optimize with example": lambda model, x, tune: zendnn_cffi.optimize(model, (x,), tune=tune),
    "torch.compile": lambda model, x, tune: torch.compile(model, backend="zendnn", options={"tune": tune}),
}


@pytest.mark.parametrize("tune", ("off", "auto"))
@pytest.mark.parametrize("branches", (False, True))
@pytest.mark.parametrize("entry", ENTRIES)
def test_nothing_is_drawn(entry: str, branches: bool, tune: str) -> None:
    torch._dynamo.reset()
    zendnn_cffi.backend.register()
    model, x = Net(branches, draws=False).eval(), torch.ones(2, 3, 9, 9)
    before = states()
    with torch.no_grad():
        fast = ENTRIES[entry](model, x, tune)
        for size in (9, 11):
            fast(torch.ones(2, 3, size, size))
    assert states() == before


@pytest.mark.parametrize("branches", (False, True))
@pytest.mark.parametrize("entry", ENTRIES)
def test_what_a_model_draws_is_drawn_as_by_eager(entry: str, branches: bool) -> None:
    torch._dynamo.reset()
    zendnn_cffi.backend.register()
    model, x = Net(branches, draws=True).eval(), torch.ones(2, 3, 9, 9)
    results = []
    with torch.no_grad():
        fast = ENTRIES[entry](model, x, "off")
        for run in (model, fast):
            torch.manual_seed(5)
            results.append((run(x), run(x), torch.get_rng_state()))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
