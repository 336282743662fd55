"""What is done to a model whose forward was replaced: calls are as without that, and become offloaded again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.model_watch import ModelWatch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first, self.drop = nn.Embedding(9, 17), nn.Linear(17, 33), nn.Dropout()
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(33, 8))
        self.register_buffer("offset", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(self.drop(self.first(self.table(x)))) + self.offset
        return result


def halve(module: Any, args: Any, result: Tensor) -> Tensor:
    return result / 2


def doubled(module: nn.Module) -> Callable[[Tensor], Tensor]:
    own = type(module).forward
    return lambda x: own(module, x) * 2


def new_linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(33, 8)


CHANGES: dict[str, Callable[[Any], object]] = {
    "another layer": lambda m: m.body.__setitem__(1, new_linear()),
    "a further layer": lambda m: m.body.append(nn.Tanh()),
    "a layer less": lambda m: m.body.__delitem__(0),
    "another parameter": lambda m: setattr(m.first, "weight", nn.Parameter(torch.ones(33, 17))),
    "other memory": lambda m: setattr(m.first.weight, "data", torch.ones(33, 17)),
    "in place": lambda m: m.first.weight.detach().mul_(3),
    "no bias": lambda m: setattr(m.first, "bias", None),
    "another buffer": lambda m: setattr(m, "offset", torch.ones(8)),
    "a hook": lambda m: m.first.register_forward_hook(halve),
    "a forward of its own": lambda m: setattr(m.first, "forward", doubled(m.first)),
    "another dtype": lambda m: m.to(torch.bfloat16),
    "dropout in training": lambda m: m.drop.train(),
    "dropout's share": lambda m: setattr(m.drop, "p", 0.9),
}


X = torch.randint(0, 9, (3, 5), generator=torch.Generator().manual_seed(1))


def check(model: nn.Module, expected: nn.Module) -> None:
    for _ in range(3):
        with torch.no_grad():
            torch.manual_seed(2)
            mine = model(X)
            torch.manual_seed(2)
            theirs = expected(X)
        is_narrow = theirs.dtype == torch.bfloat16
        torch.testing.assert_close(mine, theirs, **({"rtol": 0.05, "atol": 0.05} if is_narrow else {}))


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_counts(name: str) -> None:
    model = Net().eval()
    expected = copy.deepcopy(model)
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    check(model, expected)
    (before,) = replaced.modules
    assert before.regions()
    CHANGES[name](model)
    CHANGES[name](expected)
    check(model, expected)
    if name != "dropout in training":
        (fast,) = replaced.modules
        assert fast.regions()
        assert (fast is before) == (name == "in place")


def test_what_changes_with_each_call_is_not_optimized_each_time() -> None:
    model = Net().eval()
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    check(model, copy.deepcopy(model))
    (before,) = replaced.modules
    for _ in range(3):
        model.body[1] = new_linear()
        with torch.no_grad():
            assert torch.equal(model(X), type(model).forward(model, X))
    assert replaced.modules == [before] and "was changed" in replaced.reasons[-1]
    check(model, copy.deepcopy(model).eval())
    assert replaced.modules != [before]


def test_hooks_of_a_model_that_is_called_are_no_change() -> None:
    model = Net().eval()
    watch = ModelWatch(model)
    model.first.register_forward_hook(halve).remove()
    assert watch.unchanged()
    model.first.register_forward_hook(halve)
    assert not watch.unchanged()
