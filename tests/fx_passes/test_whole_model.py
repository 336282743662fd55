"""The graph of a model that could not be traced takes arguments as the model's own forward does."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zendnn_cffi
from fx_passes.whole_model import WholeModel, whole_model_graph

MARK = object()


class Named(nn.Module):
    def forward(self, x: Tensor, /, y: Any = 2, z: Any = MARK, *, bias: float = 1.5, dtype: Any = torch.float32) -> Any:
        return x * y + bias, z, dtype


class Many(nn.Module):
    def forward(self, x: Tensor, *rest: Any, scale: int = 3, **named: Any) -> Any:
        return x * scale, rest, named


X = torch.arange(4.0)


def counted(forward: Any) -> Any:
    """A decorator that tells what was given by position from what was given by name, as Hugging Face's do."""

    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("scale", 2.0)
        return forward(self, *args, **kwargs), len(args), sorted(kwargs)

    return wrapper


class Decorated(nn.Module):
    @counted
    def forward(self, x: Tensor, y: Any = None, scale: Any = None) -> Any:
        return x.clone() * scale if float(x.sum()) > 0 else y


DECORATED_CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((X,), {}),
    ((X, 1), {}),
    ((X,), {"scale": 3.0}),
    ((), {"x": X, "y": 1}),
    ((), {"scale": 1.0, "x": X}),
]
CALLS: list[tuple[type[nn.Module], tuple[Any, ...], dict[str, Any]]] = [
    (Named, (X,), {}),
    (Named, (X, 5), {}),
    (Named, (X,), {"y": X, "bias": 0.0}),
    (Named, (X, 1, None), {"dtype": torch.bfloat16}),
    (Named, (X,), {"z": "text"}),
    (Many, (X,), {}),
    (Many, (X, 1, X), {}),
    (Many, (X, 1), {"scale": 2, "other": X}),
    (Many, (), {"x": X, "named": 4}),
]


@pytest.mark.parametrize(("kind", "args", "kwargs"), CALLS)
def test_arguments_and_defaults_reach_forward(kind: type[nn.Module], args: Any, kwargs: Any) -> None:
    model = kind()
    gm = fx.GraphModule(model, whole_model_graph(model))
    assert sum(isinstance(node.target, WholeModel) for node in gm.graph.nodes) == 1
    ours, eager = gm(*args, **kwargs), model(*args, **kwargs)
    assert torch.equal(ours[0], eager[0])
    assert ours[1:] == eager[1:]  # among them what was given, itself


@pytest.mark.parametrize("kind", [Named, Many])
def test_parameters_stand_in_the_graph_under_their_names(kind: type[nn.Module]) -> None:
    model = kind()
    names = [node.name for node in whole_model_graph(model).find_nodes(op="placeholder")]
    assert names == [*inspect.signature(model.forward).parameters]


@pytest.mark.parametrize(("kind", "args", "kwargs"), [(Named, (), {}), (Many, (), {}), (Named, (X,), {"unknown": 1})])
def test_what_forward_refuses_is_refused(kind: type[nn.Module], args: Any, kwargs: Any) -> None:
    model = kind()
    gm = fx.GraphModule(model, whole_model_graph(model))
    for call in (model, gm):
        with pytest.raises(TypeError):
            call(*args, **kwargs)


@pytest.mark.parametrize(("args", "kwargs"), DECORATED_CALLS)
def test_a_decorated_forward_is_called_as_the_model_is(args: Any, kwargs: Any) -> None:
    model = Decorated().eval()
    fast = zendnn_cffi.optimize(model)
    assert isinstance([*fast.graph.nodes][-2].target, WholeModel)
    ours, eager = fast(*args, **kwargs), model(*args, **kwargs)
    assert torch.equal(ours[0], eager[0]) and ours[1:] == eager[1:]


def test_the_graph_gives_a_decorated_forward_what_was_given() -> None:
    model = Decorated()
    gm = fx.GraphModule(model, whole_model_graph(model))
    assert torch.equal(gm(X, scale=3.0)[0], X * 3)


def test_an_edited_graph_of_a_whole_model_is_what_runs() -> None:
    fast = zendnn_cffi.optimize(Decorated().eval())
    output = [*fast.graph.nodes][-1]
    with fast.graph.inserting_before(output):
        output.args = (fast.graph.call_function(len, (output.args[0],)),)
    fast.recompile()
    assert fast(X) == 3


class Branching(nn.Module):
    """No graph: data decides. Its block is one, and is optimized alone."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, width))
        self.last = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(-x if float(x.sum()) > 0 else x))


@pytest.mark.parametrize("example", (False, True))
@torch.no_grad()
def test_parts_that_are_replaced_or_taken_out_count(example: bool) -> None:
    """They were ignored: the model's own forward read the parts that it had at first."""
    model, x = Branching().eval(), torch.randn(3, 16)
    fast = zendnn_cffi.optimize(model, (x,) if example else None, tune="off")
    torch.testing.assert_close(fast(x), model(x))
    first, block = model.last, model.block
    fast.last = model.last = nn.Linear(24, 4)
    for each in (x, -x):
        torch.testing.assert_close(fast(each), model(each))
    fast.block = model.block = nn.Linear(16, 24)
    for each in (x, -x):
        torch.testing.assert_close(fast(each), model(each))
    del fast.last
    with pytest.raises(AttributeError, match="last"):
        fast(x)
    fast.last, fast.block, model.last, model.block = first, block, first, block
    for each in (x, -x):
        torch.testing.assert_close(fast(each), model(each))
    assert model(x).shape == (3, 8)


class Adapted(Branching):
    """A layer that is None at first; data decides, or not."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.branches, self.adapter = branches, None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) if self.branches else self.last(self.block(x))
        return y if self.adapter is None else self.adapter(y)  # type: ignore[unreachable]


@pytest.mark.parametrize("branches", (False, True))
@torch.no_grad()
def test_a_layer_that_was_none_is_put_there_and_taken_out(branches: bool) -> None:
    """The model looked for it in vain: AttributeError."""
    model, x = Adapted(branches).eval(), torch.randn(3, 16)
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    plain = fast(x)
    torch.testing.assert_close(plain, model(x))
    layer = nn.Linear(8, 5)
    fast.adapter = layer
    for _ in range(4):
        torch.testing.assert_close(fast(x), layer(plain))
    fast.adapter = None
    for _ in range(4):
        torch.testing.assert_close(fast(x), plain)
    assert model.adapter is None
