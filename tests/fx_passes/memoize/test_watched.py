"""Calls with tensors that have their own way of PyTorch's functions are the model's own."""

from __future__ import annotations

import types
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as pytree

import zendnn_cffi
from fx_passes.memoize.watched import override_functions


class Doubling(Tensor):
    """Convolutions of it are twice as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.conv2d else result


class Dispatching(Tensor):
    """The operator conv2d comes to gives half of it."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        again: Any = Tensor._make_wrapper_subclass(cls, held.shape, strides=held.stride(), dtype=held.dtype)
        again.held = held
        return again

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(lambda a: a.held if isinstance(a, cls) else a, (args, kwargs or {}))
        result = func(*args, **kwargs)
        result = result * 0.5 if "convolution" in str(func) else result
        return pytree.tree_map(lambda a: cls(a) if isinstance(a, Tensor) else a, result)


class OwnMethod(Tensor):
    def relu(self) -> Tensor:
        return self.neg()


class Duck:
    """No tensor, and PyTorch's functions take it for one."""

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(lambda a: a.held if isinstance(a, cls) else a, (args, kwargs or {}))
        return func(*args, **kwargs) * (3 if func is torch.conv2d else 1)


class Network(nn.Module):
    """A normalization that is folded into the convolution before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.norm.running_mean = torch.rand(4)

    def forward(self, x: Any) -> Any:
        return self.norm(self.conv(x)).relu()


def plain(y: Any) -> Tensor:
    y = y.held if isinstance(y, Dispatching) else y
    return y.detach().as_subclass(Tensor)


@pytest.mark.parametrize("way", ("symbolic", "example"))
@pytest.mark.parametrize(
    "make", (lambda x: x.as_subclass(Doubling), Dispatching, lambda x: x.as_subclass(OwnMethod), Duck)
)
def test_their_results_are_eager_s(make: Any, way: str) -> None:
    model, x = Network().eval(), torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        fast: Any = zendnn_cffi.optimize(model, (x,) if way == "example" else None, tune="off")
        for given in (x, make(x), x):
            ours, theirs = fast(given), model(given)
            assert type(ours) is type(theirs)
            torch.testing.assert_close(plain(ours), plain(theirs), rtol=1e-4, atol=1e-5)
    assert any(row.offloaded for row in zendnn_cffi.explain(fast).nodes)


def test_attention_of_masked_and_nested_tensors() -> None:
    """Guards of exported graphs asked nested tensors for sizes."""
    torch.manual_seed(0)
    model, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 3, 8)
    fast: Any = zendnn_cffi.optimize(model, (x,), tune="off")
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)])
    with torch.no_grad():
        for ours, theirs in zip(fast(nested).unbind(), model(nested).unbind(), strict=True):
            torch.testing.assert_close(ours, theirs)


@dataclass
class Holder:
    first: Any


def test_which_values_have_ways_of_their_own() -> None:
    x, own = torch.randn(3), torch.randn(3).as_subclass(Doubling)
    containers = (lambda v: [1, v], lambda v: {"a": (v,)}, OrderedDict, Holder, lambda v: types.SimpleNamespace(a=v))
    for hold in containers:
        wrap = (lambda v, hold=hold: hold(a=v)) if hold is OrderedDict else hold
        assert override_functions((wrap(own),))
        assert not override_functions((wrap(x),))
    assert override_functions((masked_tensor(x, x > 0), x))
    with FakeTensorMode():
        assert not override_functions((torch.empty(3),))
    assert not override_functions((x, nn.Parameter(x), nn.Buffer(x), 1, None, "a", pack_sequence([x]), nn.Linear(2, 2)))
    circle: list[Any] = [x]
    circle.append(circle)
    assert not override_functions((circle,))
