"""Functions that write to several tensors: out=(values, indices), and lists of tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from tests.support.graphs import check, model_of, outside


def _out(like: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(like), torch.zeros_like(like, dtype=torch.int64)


def _into_a_view(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    view = y[0]
    torch.sort(view, 0, out=(view, torch.empty_like(view, dtype=torch.int64)))
    return m.b(y), y


def _read_before(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    values, indices = _out(y)
    before, places = m.b(values), indices + 1
    torch.sort(y, 0, out=(values, indices))
    return m.b(values), indices, before, places


def _into_the_input(m: Any, x: Tensor) -> Any:
    before = m.a(x)
    torch.sort(x, 0, out=(x, torch.zeros_like(x, dtype=torch.int64)))
    return m.b(x), before


def _reduced(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    values, indices = _out(y[:, :1])
    before = m.b(values.expand(-1, 4))
    torch.max(y, 1, keepdim=True, out=(values, indices))
    return m.b(values.expand(-1, 4)), values, before


def _by_the_result(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    values, indices = _out(y)
    sorted_values = torch.sort(y, 0, out=(values, indices))[0]
    values.mul_(2)
    return m.b(sorted_values), m.b(values)


def _one_by_the_result(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    values = torch.zeros_like(y)
    total = torch.add(y, y, out=values)
    total.mul_(2)
    return m.b(values), m.b(total)


OUT = {
    f.__name__: f for f in (_into_a_view, _read_before, _into_the_input, _reduced, _by_the_result, _one_by_the_result)
}


@pytest.mark.parametrize("case", OUT)
def test_several_results_are_written_where_the_call_says(case: str) -> None:
    model, x = model_of(OUT[case], a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(4, 4, dtype=torch.float64)
    assert not {"linear", "a", "b"} & set(outside(check(model, x)))


@pytest.mark.parametrize("case", OUT)
def test_compiled_results_are_written_where_the_call_says(case: str) -> None:
    model, x = model_of(OUT[case], a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(4, 4, dtype=torch.float64)
    torch._dynamo.reset()
    fast, ours = torch.compile(copy.deepcopy(model), backend="zendnn", options={"tune": "off"}), x.clone()
    with torch.no_grad():
        torch.testing.assert_close(fast(ours), model(x))
    torch.testing.assert_close(ours, x)


LISTS: dict[str, Callable[[list[Tensor]], Any]] = {
    "_foreach_mul_": lambda tensors: torch._foreach_mul_(tensors, 2.0),
    "_foreach_add_": lambda tensors: torch._foreach_add_(tensors, tensors),
    "_foreach_zero_": lambda tensors: torch._foreach_zero_(tensors),
    "_foreach_copy_": lambda tensors: torch._foreach_copy_(tensors, [t + 1 for t in tensors]),
}


class Listed(nn.Module):
    def __init__(self, write: Callable[[list[Tensor]], Any], is_exported: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.write, self.is_exported = nn.Linear(4, 4), write, is_exported

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if self.is_exported and len(x) > 9:
            return x
        before, value = self.layer(x) + self.layer(y), self.layer(x * 2)
        view = value[:1]
        self.write([x, y, value])
        return before, self.layer(x), self.layer(y), self.layer(view)


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("is_exported", [False, True])
def test_all_tensors_of_a_list_are_written(name: str, is_exported: bool) -> None:
    model, args = Listed(LISTS[name], is_exported).eval(), (torch.randn(2, 4), torch.randn(2, 4))
    ours = copy.deepcopy(args)
    fast: Any = zendnn_cffi.optimize(model, copy.deepcopy(args), tune="off")
    assert not fast.leaves and "linear" not in outside(fast)
    with torch.no_grad():
        torch.testing.assert_close(fast(*ours), model(*args))
    torch.testing.assert_close(ours, args)


class Sets(nn.Module):
    """A value that is told to lie in the memory of the input, which is written then."""

    def __init__(self, is_exported: bool) -> None:
        super().__init__()
        self.layer, self.is_exported = nn.Linear(4, 4), is_exported

    def forward(self, x: Tensor) -> Tensor:
        if self.is_exported and len(x) > 9:
            return x
        y = self.layer(x)
        y.set_(x).add_(1)
        out: Tensor = self.layer(y)
        return out


@pytest.mark.parametrize("is_exported", [False, True])
def test_writes_behind_set(is_exported: bool) -> None:
    model, x = Sets(is_exported).eval(), torch.randn(2, 4)
    ours = x.clone()
    fast: Any = zendnn_cffi.optimize(model, (x.clone(),), tune="off")
    assert fast.regions()
    with torch.no_grad():
        torch.testing.assert_close(fast(ours), model(x))
    torch.testing.assert_close(ours, x)
