"""Tensors of a model that lie in each other's memory, and that its forward writes to: as in eager."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_passes.pipeline import compile_graph
from fx_passes.trace.skeleton import skeleton, tensors_of


def rows(m: Any, x: Tensor) -> Tensor:
    before = m.a(x)
    m.rows.mul_(2)
    return before + m.b(m.whole) + m.a(m.whole)


def whole(m: Any, x: Tensor) -> Tensor:
    before = m.a(m.again)
    m.whole.mul_(2)
    return before + m.b(m.again) + x


def attribute(m: Any, x: Tensor) -> Tensor:
    before = F.relu(m.whole * 2)
    m.flat.add_(1)
    return before + F.relu(m.whole * 2) + x


def in_a_list(m: Any, x: Tensor) -> Tensor:
    before = m.again * 3
    m.held[0].fill_(7.0)
    return before + m.again * 3 + m.a(x)


def of_a_parameter(m: Any, x: Tensor) -> Tensor:
    before = m.a(x)
    m.bias[:2] += 1
    return before + m.a(x)


def by_an_item(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    m.again[0] = 5
    return m.a(x) + m.b(x), m.rows + 1


def of_a_submodule(m: Any, x: Tensor) -> Tensor:
    m.inner.state.sub_(1)
    return m.a(x) * m.whole


class Counts(nn.Module):
    """Sets an attribute, which no graph has, and writes to a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        self.state.add_(self.calls)
        return x + self.state


def of_a_leaf(m: Any, x: Tensor) -> Tensor:
    result: Tensor = m.a(m.counts(x)) + m.whole
    return result


FORWARDS: Mapping[str, Callable[[Any, Tensor], Any]] = MappingProxyType(
    {f.__name__: f for f in (rows, whole, attribute, in_a_list, of_a_parameter, by_an_item, of_a_submodule, of_a_leaf)}
)


class Model(nn.Module):
    """Six tensors in one piece of memory, and one in a parameter's."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.a, self.b, self.inner, self.counts = nn.Linear(8, 8), nn.Linear(8, 8), nn.Module(), Counts()
        self.register_buffer("whole", whole := torch.randn(4, 8))
        self.register_buffer("rows", whole[:2])
        self.register_buffer("again", whole.detach())
        self.flat, self.held, self.bias = whole.view(-1), [whole[1:]], self.a.bias.detach()
        self.inner.register_buffer("state", whole[1:3, ::2])
        self.counts.register_buffer("state", whole.view(4, 8))

    def forward(self, x: Tensor) -> Any:
        return FORWARDS[self.name](self, x)


def made(name: str) -> Any:
    torch.manual_seed(0)
    return Model(name).eval()


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


COPIES: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {"itself": lambda m: m, "deep": copy.deepcopy, "pickled": lambda m: pickle.loads(pickle.dumps(m))}
)


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("has_example", (False, True))
@pytest.mark.parametrize("name", FORWARDS)
def test_they_stay_together(name: str, has_example: bool, copied: str) -> None:
    """Each had memory of its own, and did not see what was written to the others."""
    eager, original = COPIES[copied](made(name)), made(name)
    fast: Any = COPIES[copied](compile_graph(original, (X,) if has_example else None))
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(X), eager(X))
            for buffer in ("whole", "rows", "again", "inner.state", "counts.state"):
                torch.testing.assert_close(fast.get_buffer(buffer), eager.get_buffer(buffer))
    for mine, theirs in zip(tensors_of(original), tensors_of(made(name)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg="the model that was copied was written to")


def test_copies_with_state_of_their_own() -> None:
    model = made("rows")
    again: Any = skeleton(model, own_state=True)
    with torch.no_grad():
        again.rows.fill_(3)
    assert (
        bool((again.whole[:2] == 3).all())
        and bool((again.flat[:16] == 3).all())
        and bool((again.held[0][0] == 3).all())
    )
    assert bool((again.counts.state[:2] == 3).all()) and not bool((model.whole == 3).any())
    assert again.a.weight.data_ptr() == model.a.weight.data_ptr()


def test_what_is_not_written_to_stays_the_model_s() -> None:
    model = made("whole")
    model.register_buffer("other", torch.randn(4, 8))
    model.view = model.other[1:]
    fast: Any = compile_graph(model)
    fast(X)
    assert fast.other.data_ptr() == model.other.data_ptr() and fast.whole.data_ptr() != model.whole.data_ptr()
    assert fast.a.weight.data_ptr() == model.a.weight.data_ptr()


class Products(nn.Module):
    """Writes to what one function returns, and gives a parameter to another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        squares = torch.inner(x, x)
        squares.relu_()
        return self.layer(squares @ x), torch.tensordot(x, self.table, dims=1)


def test_operands_of_products_stay_the_model_s() -> None:
    """Their results passed for views of all operands, so that a write to one was a write to the parameter."""
    model = Products().eval()
    fast: Any = compile_graph(model)
    with torch.no_grad():
        fast(X)
        model.table.mul_(2)
        for _ in range(2):
            torch.testing.assert_close(fast(X), model(X))
    assert fast.table.data_ptr() == model.table.data_ptr()


def _normalizes() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU()).eval()
    model[1].train()
    return model


def _normalizes_instances() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, track_running_stats=True), nn.ReLU()).eval()
    model[1].train()
    return model


LAYERS: Mapping[str, Callable[[], tuple[nn.Module, Tensor]]] = MappingProxyType(
    {
        "batch statistics": lambda: (_normalizes(), torch.randn(2, 3, 8, 8)),
        "those of instances": lambda: (_normalizes_instances(), torch.randn(2, 3, 8, 8)),
        "rows of a table": lambda: (
            nn.Sequential(nn.Embedding(10, 8, max_norm=0.5), nn.Linear(8, 8)).eval(),
            torch.arange(5),
        ),
    }
)


@pytest.mark.parametrize("has_example", (False, True))
@pytest.mark.parametrize("layer", LAYERS)
def test_what_layers_of_pytorch_write_to(layer: str, has_example: bool) -> None:
    """Those that a graph calls as they are update what they have: that was the original's."""
    torch.manual_seed(0)
    original, x = LAYERS[layer]()
    eager, before = copy.deepcopy(original), copy.deepcopy(original.state_dict())
    fast = compile_graph(original, (x,) if has_example else None)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), eager(x))
    torch.testing.assert_close(dict(fast.state_dict()), dict(eager.state_dict()))
    torch.testing.assert_close(dict(original.state_dict()), dict(before))
