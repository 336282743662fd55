"""Loaded modules of several graphs: copies, and what is changed of them, as of one graph."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from tests.support.kinds import IDS, KINDS, MASK, X_MASK, Encoder, Optional, X, check, offloaded, served, there_and_back


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Counting(nn.Module):
    """Keeps a count in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 24)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        _, *rest = x.shape
        assert rest
        self.calls.add_(1)
        y = F.relu(self.layer(x))
        return (y if mask is None else y * mask), self.calls.clone()


@pytest.mark.parametrize("how", ("deepcopy", "copy", "pickle", "file"))
def test_copies_have_all_graphs(how: str, tmp_path: Path) -> None:
    model = Encoder()
    names = ("ids", "mask", "flag")
    loaded = there_and_back(served(model, *(KINDS[name] for name in names)), tmp_path / "m")
    with torch.no_grad():
        for name in names:
            loaded(*KINDS[name][0], **KINDS[name][1])
    ways: dict[str, Callable[[Any], Any]] = {
        "deepcopy": copy.deepcopy,
        "copy": copy.copy,
        "pickle": lambda module: pickle.loads(pickle.dumps(module)),
        "file": lambda module: there_and_back(module, tmp_path / "m"),  # over the file that it is mapped from
    }
    for again in (ways[how](loaded), ways[how](ways[how](loaded)), loaded):
        for name in (*names, *names):
            args, kwargs = KINDS[name]
            check(again, model, *args, **kwargs)
            check(again.root, model, *args, **kwargs)
            assert offloaded(again, args, kwargs) == 1
    if how != "copy":
        again = ways[how](loaded)
        with torch.no_grad():
            again.up.weight.mul_(2.0)
        for name in names:
            check(loaded, model, *KINDS[name][0], **KINDS[name][1])


def test_what_is_changed_afterwards_counts_in_each(tmp_path: Path) -> None:
    model = Encoder()
    calls = [KINDS[name] for name in ("ids", "mask", "flag")]
    loaded = there_and_back(served(model, *calls), tmp_path / "m")

    def all_right() -> None:
        for args, kwargs in calls * 3:
            check(loaded, model, *args, **kwargs)
        assert all(offloaded(loaded, args, kwargs) == 1 for args, kwargs in calls)

    all_right()
    with torch.no_grad():
        for module in (loaded, model):
            module.up.weight.mul_(-2.0)
    all_right()
    state = {name: 0.5 * value for name, value in model.state_dict().items()}
    loaded.load_state_dict(state), model.load_state_dict(state)
    all_right()
    for module in (loaded, model):
        module.head.bias = nn.Parameter(torch.ones(16))
    all_right()
    others = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert not torch.func.functional_call(loaded, others, (IDS, MASK))["scores"].any()
    all_right()
    for module in (loaded, model):
        module.double()
    for args, kwargs in (calls[0], calls[2]) * 3:
        check(loaded, model, *args, **kwargs)
    loaded.down.register_forward_hook(lambda module, args, result: result)
    for args, kwargs in calls:
        with pytest.raises(ValueError, match="down has a hook"):
            loaded(*args, **kwargs)


def test_gradients_are_plain_pytorchs(tmp_path: Path) -> None:
    model, found = Optional(), []
    loaded = there_and_back(served(model, ((X,), {}), ((X, X_MASK), {})), tmp_path / "m")
    for module in (loaded, model):
        mask = X_MASK.clone().requires_grad_()
        module(X, mask).square().sum().backward()
        found.append([mask.grad, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    assert offloaded(loaded, (X, X_MASK), {}) == 1


def test_state_that_a_forward_keeps_is_one_for_all_graphs(tmp_path: Path) -> None:
    model = Counting().eval()
    fast = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        for args in ((X,), (X, X_MASK)) * 2:
            fast(*args)
        loaded = there_and_back(fast, tmp_path / "m")
        for count, args in enumerate(((X,), (X, X_MASK)) * 3, 5):
            result, calls = loaded(*args)
            assert int(calls) == count == int(loaded.calls)
            torch.testing.assert_close(result, model(*args)[0], atol=1e-5, rtol=1e-5)
    assert all(offloaded(loaded, args, {}) == 1 for args in ((X,), (X, X_MASK)))
