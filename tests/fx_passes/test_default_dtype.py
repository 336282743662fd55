"""A graph holds tensors that forward made in the default dtype that there was: another one is noticed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from tests.support.lowering import noise
from tests.tolerance import assert_close


class Made(nn.Module):
    """Its result has the default dtype, as it makes tensors of it, and divides integers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 5)
        self.register_buffer("counts", torch.arange(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.tensor([0.1]) + torch.ones(5) + self.counts / 3


@pytest.fixture
def default_dtype() -> Iterator[Callable[[torch.dtype], None]]:
    """What sets the default dtype, until the test ends."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


WAYS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda fast: fast,
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
    "pickled": lambda fast: pickle.loads(pickle.dumps(fast)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("example", [False, True])
def test_another_default_dtype_counts(way: str, example: bool, default_dtype: Callable[[torch.dtype], None]) -> None:
    model, x = Made().eval(), noise(3, 5)
    fast = zendnn_cffi.optimize(model, (x,) if example else None, tune="off")
    for dtype in (torch.float32, torch.float64, torch.float32):
        default_dtype(dtype)
        other = WAYS[way](fast)
        with torch.no_grad():
            for _ in range(2):
                ours, theirs = other(x), model(x)
                assert ours.dtype == theirs.dtype == dtype
                assert_close(ours, theirs, k=5)


def test_the_graph_runs_under_the_default_dtype_it_was_made_in(default_dtype: Callable[[torch.dtype], None]) -> None:
    model, x = Made().eval(), noise(3, 5)
    default_dtype(torch.float64)
    fast = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        assert_close(fast(x), model(x), dtype=torch.float32, k=5)
    (region,) = fast.regions().values()
    assert len(region.lowered) == 1
    default_dtype(torch.float32)
    with torch.no_grad():
        assert fast(x).dtype == torch.float32
    assert len(region.lowered) == 1
