"""The limit on CPU time ends with its block, and is no exception that a model would catch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fx_passes.trace.time_limit import TooLong, within


def test_a_limit_ends_with_its_block() -> None:
    x = torch.randn(3, 4)
    with within(60.0):
        assert torch.equal(x.relu(), F.relu(x))
    with pytest.raises(TooLong), within(0.0):
        x.relu()
    assert torch.equal(x.relu(), F.relu(x))


def test_it_is_no_exception_that_a_model_catches() -> None:
    caught = []
    with pytest.raises(TooLong), within(0.0):
        try:
            torch.zeros(1)
        except Exception as error:
            caught.append(error)
    assert not caught
