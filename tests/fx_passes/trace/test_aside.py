"""Forwards that write to parameters: the model is as eager PyTorch leaves it, and only its calls write."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.trace.aside import writes_aside
from fx_passes.trace.skeleton import skeleton
from fx_passes.trace.state import is_near
from tests.support.lowering import noise
from tests.tolerance import assert_close

# No graph follows them, so that they are called on an example.
MODELS = """
import torch
from torch import nn


class Once(nn.Module):
    "As Transformers' RWKV: its first call divides weights, and sets a flag."

    def __init__(self):
        super().__init__()
        self.first, self.parts, self.is_scaled = nn.Linear(6, 6), nn.ModuleList([nn.Linear(6, 6)]), False

    def forward(self, x):
        if not self.is_scaled:
            with torch.no_grad():
                self.parts[0].weight.div_(2)
            self.is_scaled = True
        return self.parts[0](self.first(x))


class Always(nn.Module):
    "Each call writes, beside layers that it does not write to."

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.ReLU())

    def forward(self, x):
        with torch.no_grad():
            self.first.weight.t()[0].mul_(0.5)
        y = self.first(x)
        return self.last(-y if y.sum() > 1e9 else y)


class Graph(nn.Module):
    "A graph that torch.export makes, and that is compared with the model."

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.mul_(1.5)
        return self.layer(x)


class Handed(nn.Module):
    "Writes to parameters that torch.fx does not stand for."

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    @torch.no_grad()
    def scale(self):
        for parameter in self.parameters():
            parameter.mul_(0.5)

    def forward(self, x):
        self.scale()
        return self.layer(x)


class Listed(Handed):
    "To one that a list holds, too."

    def __init__(self):
        super().__init__()
        self.kept = [self.layer.bias]

    @torch.no_grad()
    def scale(self):
        self.kept[0].mul_(0.5)


class Inside(nn.Module):
    "As a layer of a graph."

    def __init__(self):
        super().__init__()
        self.first, self.handed, self.listed = nn.Linear(6, 6), Handed(), Listed()

    def forward(self, x):
        return self.first(self.listed(self.handed(self.first(x))))
"""
NAMES = ("Once", "Always", "Graph", "Handed", "Listed", "Inside")


@pytest.fixture(params=("site-packages", "project"))
def models(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The models as an installed library's, and as the user's."""
    name = f"models_of_{request.param.replace('-', '_')}"
    folder = tmp_path / request.param
    folder.mkdir()
    (folder / f"{name}.py").write_text(MODELS)
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module(name)
    assert is_near(name) == (request.param == "project")
    yield module
    del sys.modules[name]


def made(models: Any, name: str) -> Any:
    torch.manual_seed(0)
    return getattr(models, name)().eval()


def state_of(model: Any) -> dict[str, Any]:
    tensors = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return {**tensors, "is_scaled": getattr(model, "is_scaled", None)}


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys() and one["is_scaled"] == other["is_scaled"]
    for key in one.keys() - {"is_scaled"}:
        assert torch.equal(one[key], other[key]), key


@pytest.mark.parametrize("has_example", (False, True))
@pytest.mark.parametrize("name", NAMES)
def test_calls_write_and_the_original_stays(models: Any, name: str, has_example: bool) -> None:
    x, eager, original = noise(3, 6), made(models, name), made(models, name)
    before, counts = state_of(original), [each._version for each in original.parameters()]
    with torch.no_grad():
        fast: Any = zendnn_cffi.optimize(original, (x,) if has_example else None, tune="off")
        for _ in range(3):
            assert_close(fast(x), eager(x), k=6)
    assert_same_state(state_of(original), before)
    assert [each._version for each in original.parameters()] == counts
    for key, value in eager.state_dict().items():
        assert torch.equal(fast.state_dict()[key], value), key


@pytest.mark.parametrize("name", NAMES)
def test_a_replaced_forward_leaves_the_model_as_eager_does(models: Any, name: str) -> None:
    x, eager, model = noise(3, 6), made(models, name), made(models, name)
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    with torch.no_grad():
        for _ in range(4):
            assert_close(model(x), eager(x), k=6)
            assert_same_state(state_of(model), state_of(eager))
        replaced.undo()
        assert_close(model(x), eager(x), k=6)
    assert_same_state(state_of(model), state_of(eager))


def test_what_is_not_written_to_stays_shared(models: Any) -> None:
    x, original = noise(3, 6), made(models, "Always")
    with torch.no_grad():
        fast: Any = zendnn_cffi.optimize(original, (x,), tune="off")
    assert list(fast.optimized_submodules) == ["last"]
    theirs = fast.state_dict()
    own = [key for key, value in original.state_dict().items() if value.data_ptr() != theirs[key].data_ptr()]
    assert own == ["first.weight"]


WRITES: dict[str, Callable[[nn.Linear], Any]] = {
    "in place": lambda m: m.weight.mul_(2),
    "an item": lambda m: m.weight.__setitem__(0, 7.0),
    "a view": lambda m: m.weight.t()[1:].add_(1),
    "by data": lambda m: m.weight.data.fill_(3.0),
    "out": lambda m: torch.mul(m.weight.detach(), 2, out=m.weight.data),
    "several": lambda m: torch._foreach_mul_([m.weight, m.bias], 2.0),
    "by init": lambda m: nn.init.ones_(m.weight),
}


@pytest.mark.parametrize("way", WRITES)
@torch.no_grad()
def test_each_way_to_write_is_seen_and_read_back(way: str) -> None:
    model = nn.Linear(6, 6)
    before, counts = copy.deepcopy(model), [each._version for each in model.parameters()]
    expected, copied, x = copy.deepcopy(model), skeleton(model), noise(3, 6)
    view = copied.weight.detach()[1:]  # from before the write
    WRITES[way](expected)
    with writes_aside(model) as aside:
        WRITES[way](copied)
        assert torch.equal(copied(x), expected(x)) and torch.equal(view + 0, expected.weight[1:])
        assert copied.weight.add_(0) is copied.weight
    assert set(aside.names()) == {("", "weight"), *([("", "bias")] if way == "several" else [])}
    for mine, theirs in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert [each._version for each in model.parameters()] == counts


@torch.no_grad()
def test_reading_copies_nothing_and_own_memory_is_written() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)), noise(3, 6)
    copied: Any = skeleton(model, own_parameters=True)
    with writes_aside(model) as aside:
        x.add_(1)
        model(x)
        copied[0].weight.zero_()
        copied[0].bias.t_()
    assert not aside.names() and bool((copied[0].weight == 0).all())


def test_tensors_that_are_no_plain_memory() -> None:
    model = nn.Module()
    model.sparse, model.nothing = Tensor([[0.0, 1.0]]).to_sparse(), torch.empty(0)
    with writes_aside(model) as aside:
        model.nothing.add_(1)
        model.sparse.mul_(1)
    assert not aside.names()
