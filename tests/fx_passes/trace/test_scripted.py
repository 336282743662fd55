"""Models with ScriptModules inside: these stay whole, read the model's weights, and write to their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from fx_passes.trace.scripted import sets_attributes
from fx_passes.trace.skeleton import skeleton
from tests.support.lowering import noise


class Counts(nn.Module):
    """Its buffer is written to in place, through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count[0:4].add_(1)
        return x + self.count


class Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() > 1:
            self.calls += 1
        return x + self.calls


class Rectified(nn.Module):
    """Writes in place to what it computed, which no buffer is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).relu_()


PARTS: dict[str, Any] = {
    "scripted": lambda: torch.jit.script(nn.Linear(8, 8).eval()),
    "traced": lambda: torch.jit.trace(nn.Linear(8, 8).eval(), torch.ones(2, 8)),
    "frozen": lambda: torch.jit.freeze(torch.jit.script(nn.Linear(8, 8).eval())),
    "normalizes": lambda: torch.jit.script(nn.BatchNorm1d(8).eval()),
    "rectifies": lambda: torch.jit.script(Rectified().eval()),
}
STATEFUL: dict[str, Any] = {
    "counts": lambda: torch.jit.script(Counts().eval()),
    "sets": lambda: torch.jit.script(Sets().eval()),
}


class Holds(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.last = part, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.part(x))


@pytest.mark.parametrize("given", (True, False))
@pytest.mark.parametrize("name", PARTS)
@torch.no_grad()
def test_other_layers_are_on_the_engine_and_changed_weights_are_read(name: str, given: bool) -> None:
    model, x = Holds(PARTS[name]()), noise(3, 8)
    model.last.eval()
    model.training = False
    fast = zendnn_cffi.optimize(model, x if given else None, tune="off")
    torch.testing.assert_close(fast(x), model(x))
    assert [node.became for node in zendnn_cffi.explain(fast).nodes] == ["torch", "inner_product"]
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.mul_(1.5)
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("given", (True, False))
@pytest.mark.parametrize("name", STATEFUL)
@torch.no_grad()
def test_state_is_not_the_model_s(name: str, given: bool) -> None:
    model, x = Holds(STATEFUL[name]()).eval(), noise(3, 8)
    before = copy.deepcopy(model)
    fast = zendnn_cffi.optimize(model, x if given else None, tune="off")
    found = [fast(x) for _ in range(3)]
    for result in found:
        torch.testing.assert_close(result, before(x))
    assert all(torch.equal(buffer, torch.zeros(8)) for buffer in model.buffers())


@pytest.mark.parametrize("name", PARTS)
@torch.no_grad()
def test_a_replaced_forward(name: str) -> None:
    model, x = Holds(PARTS[name]()), noise(3, 8)
    model.last.eval()
    model.training = False
    expected = model(x)
    zendnn_cffi.replace_forward(model, tune="off")
    torch.testing.assert_close(model(x), expected)
    assert "inner_product" in str(zendnn_cffi.explain(model))


@pytest.mark.parametrize(("name", "changed"), {"counts": "part.count", "sets": "attributes of part"}.items())
@torch.no_grad()
def test_a_replaced_forward_leaves_state_to_the_model(name: str, changed: str) -> None:
    model, x = Holds(STATEFUL[name]()).eval(), noise(3, 8)
    other = copy.deepcopy(model)
    zendnn_cffi.replace_forward(model, tune="off")
    for _ in range(3):
        assert torch.equal(model(x), other(x))
    with pytest.raises(TypeError, match=f"calls stayed plain PyTorch: its forward changes {changed}"):
        zendnn_cffi.explain(model)


def test_copies_own_what_they_are_asked_to() -> None:
    model = Holds(PARTS["normalizes"]()).eval()
    part: Any = model.part
    for own_state in (False, True):
        for own_parameters in (False, True):
            copied: Any = skeleton(model, own_state=own_state, own_parameters=own_parameters)
            assert (copied.part.running_mean.data_ptr() != part.running_mean.data_ptr()) is own_state
            assert (copied.part.weight.data_ptr() != part.weight.data_ptr()) is own_parameters
            assert copied.part is not part and copied.part.weight is not part.weight


def test_who_sets_attributes() -> None:
    assert sets_attributes(STATEFUL["sets"]())
    assert not any(sets_attributes(part) for part in (STATEFUL["counts"](), PARTS["frozen"](), nn.Linear(8, 8)))
