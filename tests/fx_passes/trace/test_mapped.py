"""Maps of element-wise operations are written out; others stay whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

import zendnn_cffi  # noqa: F401 - the backend
from tests.support.lowering import noise
from zendnn_cffi.backend import compiled_modules

ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "one operation": lambda x, y: vmap(torch.mul)(x, y),
    "several": lambda x, y: vmap(lambda a, b: torch.exp(a * b) - (a + 2) / 3)(x, y),
    "two results": lambda x, y: vmap(lambda a, b: (a * b, -b))(x, y),
    "of numbers": lambda x, y: vmap(lambda a: a + 1)(x[0, 0]),
    "one after the other": lambda x, y: vmap(torch.add)(vmap(torch.mul)(x, y), y),
}

OTHERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "broadcast over the map": lambda x, y: vmap(torch.mul)(x, y[:, 0]),
    "another dimension": lambda x, y: vmap(torch.mul, in_dims=1)(x, y),
    "mapped elsewhere": lambda x, y: vmap(torch.mul, out_dims=1)(x, y),
    "one not mapped": lambda x, y: vmap(torch.mul, in_dims=(0, None))(x, y[0]),
    "a reduction": lambda x, y: vmap(lambda a, b: (a * b).sum(0))(x, y),
    "read as it is": lambda x, y: vmap(lambda a, b: (a, a * b))(x, y),
    "a map of a map": lambda x, y: vmap(vmap(torch.mul))(x, y),
}


class Model(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


def compiled(function: Callable[..., Any]) -> Any:
    """What torch.compile made of it, of which the results are eager's."""
    model, x, y = Model(function).eval(), noise(3, 4, 5), noise(3, 4, 5, seed=1)
    torch._dynamo.reset()
    before = len(compiled_modules())
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="zendnn")(x, y), model(x, y))
    (module,) = compiled_modules()[before:]
    return module


def has_modes(module: Any) -> bool:
    return any("under_mode" in str(node.target) for node in module.graph.nodes)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_element_wise_maps_are_written_out(name: str) -> None:
    module = compiled(ELEMENTWISE[name])
    assert not has_modes(module)
    assert not any("nesting" in str(n.target) or "lazy_load" in str(n.target) for n in module.graph.nodes)


@pytest.mark.parametrize("name", OTHERS)
def test_other_maps_stay_whole(name: str) -> None:
    assert has_modes(compiled(OTHERS[name]))
