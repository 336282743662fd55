"""The limit on CPU time ends with its block, and is no exception that a model would catch."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

from fx_passes.trace.time_limit import Limit, TooLong


def test_a_limit_ends_with_its_block() -> None:
    x = torch.randn(3, 4)
    with Limit(60.0):
        assert torch.equal(x.relu(), F.relu(x))
    with pytest.raises(TooLong), Limit(0.0):
        x.relu()
    assert torch.equal(x.relu(), F.relu(x))


def test_it_is_no_exception_that_a_model_catches() -> None:
    caught = []
    with pytest.raises(TooLong), Limit(0.0):
        try:
            torch.zeros(1)
        except Exception as error:
            caught.append(error)
    assert not caught


@pytest.mark.parametrize("longest, over", ((1.0, True), (9.0, False)))
def test_many_operations_may_take_longer_than_long_sizes(longest: float, over: bool) -> None:
    class Windows(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """x [N, L]; returns [N, 4, L / 4]."""
            with Limit(0.0, longest):
                y = x.unflatten(1, (4, x.shape[1] // 4))
                for _ in range(4):
                    y = y.relu()
            return y

    shapes = {"x": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}
    with pytest.raises(TooLong) if over else contextlib.nullcontext():
        torch.export.export(Windows(), (torch.randn(3, 16),), dynamic_shapes=shapes)
