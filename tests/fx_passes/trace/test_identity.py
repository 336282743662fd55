"""Forwards that ask whether two values are one object go the way that they go in eager: no graph tells it."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes.pipeline import compile_graph
from fx_passes.trace.traced import WHOLE
from tests.support.graphs import image, model_of

# The first ones return their operand itself in eager, the others another tensor.
RESULTS: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        "dropout": lambda m, x: F.dropout(x, 0.5, False),
        "dropout module": lambda m, x: m.drop(x),
        "identity module": lambda m, x: m.same(x),
        "flatten": lambda m, x: x.flatten(1),
        "contiguous": lambda m, x: x.contiguous(),
        "to": lambda m, x: x.to(torch.float64),
        "real": lambda m, x: x.real,
        "positive": lambda m, x: +x,
        "in place": lambda m, x: x.mul_(2),
        "relu in place": lambda m, x: F.relu(x, inplace=True),
        "out": lambda m, x: torch.add(x, 1, out=x),
        "view": lambda m, x: x.view(x.shape),
        "detach": lambda m, x: x.detach(),
        "clone": lambda m, x: x.clone(),
    }
)
RETURN_ANOTHER = ("view", "detach", "clone")


def one_object(a: Any, b: Any) -> bool:
    return a is b


def by_number(a: Any, b: Any) -> bool:
    return {id(b): True}.get(id(a), False)


def held(a: Any, b: Any) -> bool:
    holder = SimpleNamespace(value=b)
    return a is holder.value


ASKED: Mapping[str, Callable[[Any, Any], bool]] = MappingProxyType(
    {
        "is": one_object,
        "is not": lambda a, b: not (a is not b),
        "operator": lambda a, b: operator.is_(a, b),
        "id": by_number,
        "attribute": held,
        "comprehension": lambda a, b: any(each is b for each in [a]),
        "item": lambda a, b: a is [b][0],
    }
)


def model_that_asks(result: str, asked: str, transformer: bool = False) -> nn.Module:
    make, ask = RESULTS[result], ASKED[asked]

    def chosen(m: Any, x: Any) -> Any:
        return m.a(x) if ask(make(m, x), x) else -m.a(x)

    def forward(m: Any, x: Any) -> Any:
        return m.t(chosen(m, x)[None])[0] if transformer else chosen(m, x)

    torch.manual_seed(0)
    children = {"a": nn.Linear(4, 4), "drop": nn.Dropout(), "same": nn.Identity()}
    layer = {"t": nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)} if transformer else {}
    return model_of(forward, **children, **layer).eval()


def compare(model: nn.Module, *, with_example: bool) -> nn.Module:
    fast = compile_graph(model, (image(6, 4),) if with_example else None)
    with torch.no_grad():
        for size in (6, 3):
            torch.testing.assert_close(fast(image(size, 4)), model(image(size, 4)))
    return fast


@pytest.mark.parametrize("with_example", (False, True), ids=["without example", "with example"])
@pytest.mark.parametrize("result", RESULTS)
def test_a_result_that_may_be_its_operand(result: str, with_example: bool) -> None:
    model = model_that_asks(result, "is")
    assert WHOLE in compare(model, with_example=with_example).leaves
    x = image(3, 4)
    with torch.no_grad():
        assert (RESULTS[result](model, x) is x) == (result not in RETURN_ANOTHER)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("transformer", (False, True), ids=["plain", "transformer"])
def test_every_way_of_asking(asked: str, transformer: bool) -> None:
    fast = compare(model_that_asks("dropout", asked, transformer), with_example=transformer)
    assert WHOLE in fast.leaves


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


NOTHING = object()


def renamed(m: Any, x: Any, y: Any) -> Any:
    z = y
    return m.a(x) if z is NOTHING else -m.a(x)


def matched(m: Any, x: Any, y: Any) -> Any:
    match y:
        case True:
            return m.a(x)
        case None:
            return -m.a(x)
        case _:
            return x


ARGUMENTS: Mapping[str, Any] = MappingProxyType(
    {
        "constant": (lambda m, x, y: m.a(x) if y is True else -m.a(x), (True, 1, image(1), False)),
        "member": (lambda m, x, y: m.a(x) if y is Mode.FAST else -m.a(x), (Mode.FAST, image(1), Mode.SLOW)),
        "not member": (lambda m, x, y: m.a(x) if y is not Mode.FAST else -m.a(x), (Mode.FAST, image(1), Mode.SLOW)),
        "global": (lambda m, x, y: m.a(x) if y is NOTHING else -m.a(x), (NOTHING, image(1), 3)),
        "by name alone": (lambda m, x, *, y: m.a(x) if y is NOTHING else -m.a(x), (NOTHING, image(1), 3)),
        "of another name": (renamed, (NOTHING, image(1), 3)),
        "by match": (matched, (True, None, 1, image(1))),
        "in a lambda": (lambda m, x, y: (lambda z: m.a(x) if z is NOTHING else -m.a(x))(y), (NOTHING, image(1), 3)),
        "in a dictionary": (lambda m, x, y: m.a(x) if y["m"] is Mode.FAST else -m.a(x), ({"m": Mode.FAST}, {"m": 1})),
        "among keywords": (lambda m, x, **z: m.a(x) if z["y"] is NOTHING else -m.a(x), (NOTHING, image(1), 3)),
        "in a function": (lambda m, x, y: m.a(x) if is_nothing(y) else -m.a(x), (NOTHING, image(1), 3)),
    }
)


def is_nothing(value: Any) -> bool:
    return value is NOTHING


@pytest.mark.parametrize("first", (None, 0, 1))
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_that_are_compared_with_objects(kind: str, first: int | None) -> None:
    forward, values = ARGUMENTS[kind]
    model = model_of(forward, a=nn.Linear(4, 4))
    x = image(3, 4)
    fast = compile_graph(model, None if first is None else {"x": x, "y": values[first]})
    with torch.no_grad():
        for value in (*values, *values):
            torch.testing.assert_close(fast(x, y=value), model(x, y=value))
    if first is None and kind != "among keywords":
        assert not fast.leaves


@pytest.mark.parametrize("with_example", (False, True))
def test_an_argument_by_star_that_is_compared(with_example: bool) -> None:
    model = model_of(lambda m, *xs: m.a(xs[0]) if xs[1] is True else -m.a(xs[0]), a=nn.Linear(4, 4))
    x = image(3, 4)
    fast = compile_graph(model, (x, True) if with_example else None)
    with torch.no_grad():
        for value in (True, 1, x, True):
            torch.testing.assert_close(fast(x, value), model(x, value))


def test_a_submodule_alone_stays_plain() -> None:
    model = model_of(lambda m, x: m.b(m.inner(x)), b=nn.Linear(4, 4), inner=model_that_asks("contiguous", "is"))
    for with_example in (False, True):
        assert list(compare(model, with_example=with_example).leaves) == ["inner"]


def test_strides_that_the_example_has_not() -> None:
    fast = compile_graph(model := model_that_asks("contiguous", "is"), (image(6, 4),))
    with torch.no_grad():
        torch.testing.assert_close(fast(image(4, 6).t()), model(image(4, 6).t()))


def test_classes_and_functions_may_be_compared() -> None:
    activation = F.relu

    def forward(m: Any, x: Any) -> Any:
        kind = dict
        return m.a(x) if activation is F.relu and kind is dict and m.same is not None else -m.a(x)

    model = model_of(forward, a=nn.Linear(4, 4), same=nn.Identity())
    assert not compare(model, with_example=False).leaves
