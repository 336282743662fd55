"""What runs under autocast or a function transform means something else there: it stays plain, in its place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

import zendnn_cffi
from tests.support.lowering import noise
from tests.tolerance import assert_close
from zendnn_cffi.backend import compiled_modules


class Layers(nn.Module):
    """Linear layers, and a function of them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(9, 9), nn.Linear(9, 9)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def _vmap(m: Any, x: Tensor) -> Tensor:
    return vmap(lambda row: m.a(row).relu())(x)


def _grad(m: Any, x: Tensor) -> Tensor:
    return grad(lambda v: m.a(v).pow(2).sum())(x)


def _jvp(m: Any, x: Tensor) -> Tensor:
    value, tangent = jvp(lambda v: m.a(v).tanh(), (x,), (x.cos(),))
    return value + tangent


def _nested(m: Any, x: Tensor) -> Tensor:
    return vmap(grad(lambda row: m.a(row).pow(2).sum()))(x)


def _identity(m: Any, x: Tensor) -> Tensor:
    return vmap(lambda row: row)(x)


PARTS = {"vmap": _vmap, "grad": _grad, "jvp": _jvp, "vmap of grad": _nested, "identity": _identity}

COMBINATIONS = [("vmap", "grad"), ("jvp", "vmap of grad"), ("vmap", "identity"), tuple(PARTS)]


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_function_transforms_side_by_side(names: tuple[str, ...]) -> None:
    """Layers of equal spelling outside, and in two transforms, are not joined; the layers around are offloaded."""

    def function(m: Any, x: Tensor) -> Tensor:
        y = m.b(x).relu()
        return m.b(sum((PARTS[name](m, y) for name in names), m.a(y)))

    model, x = Layers(function).eval(), noise(4, 9)
    torch._dynamo.reset()
    before = len(compiled_modules())
    with torch.inference_mode() if len(names) > 2 else torch.no_grad():
        expected = model(x)
        assert_close(torch.compile(model, backend="zendnn")(x), expected, k=27)
    (module,) = compiled_modules()[before:]
    inside = [node for r in module.regions().values() for node in r.graph.nodes]  # type: ignore[operator]
    assert sum(getattr(node.target, "__name__", "") == "linear" for node in inside) == 3


def _half(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    with torch.autocast("cpu", torch.bfloat16):
        z = m.a(x).relu()
    return m.b(y), z


def _half_but_for_a_part(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = m.a(x)
        with torch.autocast("cpu", enabled=False):
            z = m.a(x)
    return m.b(x), y, z


def _off(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    with torch.autocast("cpu", enabled=False):
        z = m.b(y.float())
    return y, z


@pytest.mark.parametrize("outer", (False, True))
@pytest.mark.parametrize("function", (_half, _half_but_for_a_part, _off))
@pytest.mark.parametrize("way", ("compile", "symbolic", "example"))
def test_autocast_inside_of_forward(way: str, function: Callable[..., Any], outer: bool) -> None:
    """Results have the dtypes that eager gives them, whether or not autocast is on around the call, too."""
    model, x = Layers(function).eval(), noise(4, 9)
    torch._dynamo.reset()
    example = (x,) if way == "example" else None
    fast = torch.compile(model, backend="zendnn") if way == "compile" else zendnn_cffi.optimize(model, example)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=outer):
        for _ in range(2):
            for actual, expected in zip(fast(x), model(x), strict=True):
                assert actual.dtype == expected.dtype
                assert_close(actual.float(), expected.float(), k=18)


def test_autocast_that_is_off_anyway_costs_nothing() -> None:
    model, x = Layers(_off).eval(), noise(4, 9)
    torch._dynamo.reset()
    before = len(compiled_modules())
    with torch.no_grad():
        torch.compile(model, backend="zendnn")(x)
    (module,) = compiled_modules()[before:]
    assert len(module.regions()) == 1  # type: ignore[operator]


def test_a_part_that_writes_to_what_it_is_given() -> None:
    """Readers before it read the old values, those after it the new ones."""

    def function(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        z = m.b(y)
        with torch.autocast("cpu", torch.bfloat16):
            y.add_(1)
        return z, m.b(y)

    model, x = Layers(function).eval(), noise(4, 9)
    torch._dynamo.reset()
    with torch.no_grad():
        for actual, expected in zip(torch.compile(model, backend="zendnn")(x), model(x), strict=True):
            assert_close(actual, expected, k=18)


def _masked(m: Any, x: Tensor) -> Tensor:
    """Attention between neighbours, whose mask is a function of two positions, as Hugging Face's models have it."""
    places = torch.arange(x.shape[0])
    near = vmap(vmap(lambda q, k: (q // 2 - k // 2).abs() < 2, (None, 0)), (0, None))(places, places)
    scores = (m.a(x) @ m.b(x).T).masked_fill(~near, -torch.inf)
    return m.b(scores.softmax(-1) @ x)


EXPORTED = {**PARTS, "masked": _masked}
BY_GRAPH = {"vmap", "jvp", "identity", "masked"}  # torch.export raises for the others, which stay plain as a whole


@pytest.mark.parametrize("name", EXPORTED)
def test_function_transforms_in_exported_graphs(name: str) -> None:
    """The calls that enter and leave them have no reader: taken for dead, what is inside raised."""

    def function(m: Any, x: Tensor) -> Tensor:
        if x.shape[0] > 1000:  # so that torch.export is asked
            raise ValueError("too many rows")
        result: Tensor = EXPORTED[name](m, m.b(x).relu())
        return result

    model, x = Layers(function).eval(), noise(5, 9)
    gm: Any = zendnn_cffi.optimize(model, (x,), tune="off")
    for module in (gm, copy.deepcopy(gm)):
        with torch.no_grad():
            for given in (x, noise(7, 9), noise(1, 9)):
                assert_close(module(given), model(given), k=27)
        assert [*module.state_dict()] == [*model.state_dict()]
    kinds = [kind for kind, _ in zendnn_cffi.explain(gm).counts()]
    assert ("inner_product" in kinds) == (name in BY_GRAPH) == (gm.leaves == {})
