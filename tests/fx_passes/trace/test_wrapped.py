"""Functions that torch.fx.wrap hides are followed where an example answers what they ask, and hidden again after."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, fx, nn
from torch.fx import _symbolic_trace as fx_tracing

from fx_passes.trace.wrapped import has_wrapped, wrapped_followed
from tests.fx_passes.trace.test_decisions import optimized, same

SPACES = [vars(sys.modules[__name__])]


@fx.wrap
def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    middle = int(x.shape[1]) // 2
    return x[:, :middle], x[:, middle:]


@fx.wrap
def largest_first(x: Tensor) -> Tensor:
    return x if x.flatten()[0] > 0 else -x


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = halves(self.a(x))
        return self.b(first * second)


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(largest_first(self.a(x)))


def test_its_operations_are_in_one_region() -> None:
    model = Halving()
    gm = optimized(model, torch.randn(3, 8, 2, 2))
    assert len(gm.regions()) == 1 and gm._source[0].guards is None
    assert not gm.graph.find_nodes(op="call_function", target=halves)
    for n in (1, 3, 5):
        same(gm, model, torch.randn(n, 8, 2, 2))


def test_one_that_asks_for_numbers_stays_hidden() -> None:
    model = Choosing()
    gm = optimized(model, torch.randn(3, 8, 2, 2))
    assert gm.graph.find_nodes(op="call_function", target=largest_first)
    for _ in range(4):
        same(gm, model, torch.randn(3, 8, 2, 2))


def test_they_are_hidden_again() -> None:
    before = dict(fx_tracing._wrapped_fns_to_patch)
    assert has_wrapped(SPACES) and not has_wrapped([{}])
    with wrapped_followed(SPACES):
        assert not has_wrapped(SPACES)
    assert fx_tracing._wrapped_fns_to_patch == before
