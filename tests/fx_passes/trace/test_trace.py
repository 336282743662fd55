"""From modules to graphs: the copy of the tree, what stays whole, which arguments the graph is for."""

from __future__ import annotations

import collections
import copy
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from fx_passes.pipeline import compile_graph
from fx_passes.trace.skeleton import TraceError, skeleton
from tests.support.graphs import check, check_equal, count, image, model_of, outside


def test_skeleton_shares_storage_and_nothing_else() -> None:
    model = model_of(lambda m, x: m.c(x), c=nn.Conv2d(3, 3, 1), n=nn.BatchNorm2d(3))
    copied = skeleton(model)
    for (name, mine), (other, theirs) in zip(copied.state_dict().items(), model.state_dict().items(), strict=True):
        assert name == other and mine.data_ptr() == theirs.data_ptr()
    assert not {id(m) for m in copied.modules()} & {id(m) for m in model.modules()}
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in model.parameters()}


def test_skeleton_keeps_ties_and_buffers_that_are_not_saved() -> None:
    shared = nn.Linear(3, 3)
    model = model_of(lambda m, x: m.b(m.a(x)), a=shared, b=shared, c=nn.Linear(3, 3))
    model.c.weight = shared.weight
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    copied: Any = skeleton(model)
    assert copied.a is copied.b and copied.c.weight is copied.a.weight
    assert list(copied.state_dict()) == list(model.state_dict()) and "scratch" in dict(copied.named_buffers())


def test_the_model_is_not_touched() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.last = m.c(x)
        m.calls = getattr(m, "calls", 0) + 1
        return m.last.relu()

    model = model_of(forward, c=nn.Conv2d(3, 3, 1))
    attributes, state = set(model.__dict__), copy.deepcopy(model.state_dict())
    gm = compile_graph(model)
    gm(image())
    gm.half()
    gm.c.register_forward_hook(print)
    assert set(model.__dict__) == attributes and not model.c._forward_hooks
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]) and value.dtype == torch.float64


def test_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        compile_graph(nn.Conv2d(3, 3, 1))


def test_lazy_modules_are_refused_with_the_remedy() -> None:
    with pytest.raises(TraceError, match="call the model once"):
        compile_graph(nn.Sequential(nn.LazyLinear(3)).eval())


Pair = collections.namedtuple("Pair", "first second")

OUTPUTS = {
    "dict": lambda y: {"a": y, "b": [y.relu(), {"c": y * 2}]},
    "namedtuple": lambda y: Pair(y, y.tanh()),
    "nothing in it": lambda y: (y, None, 3, "text"),
    "the same twice": lambda y: (y, y),
    "list": lambda y: [y, y.flatten(1)],
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_keep_their_structure(kind: str) -> None:
    model = model_of(lambda m, x: OUTPUTS[kind](m.c(x)), c=nn.Conv2d(3, 3, 1))
    gm = check(model, image())
    assert type(gm(image())) is type(model(image()))


def test_an_input_that_is_returned_is_the_input() -> None:
    gm = check(model_of(lambda m, x: (x, x.flatten(1), m.c(x)), c=nn.Conv2d(3, 3, 1)), image())
    x = image()
    same, view, _ = gm(x)
    assert same is x and view.data_ptr() == x.data_ptr()


class Shapes(nn.Module):
    """Control flow on sizes: torch.export follows it, and states what it relied on."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(3, 4, 3, padding=1)
        self.n = nn.BatchNorm2d(4)
        self.r = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.r(self.n(self.c(x))) if x.shape[2] > 4 else self.c(x)
        return {"y": y.mean((2, 3)).reshape(x.shape[0], -1), "pair": (y, y + 1)}


@pytest.fixture(scope="module")
def exported() -> tuple[nn.Module, Any]:
    model = Shapes().eval().double()
    return model, compile_graph(model, (image(2, 3, 8, 8),))


def test_export_follows_sizes(exported: tuple[nn.Module, Any]) -> None:
    model, gm = exported
    assert not gm.leaves and not outside(gm) and count(gm)["convolution"] == 1
    check_equal(model, gm, image(2, 3, 8, 8))
    check_equal(model, gm, image(5, 3, 9, 6))


def test_other_sizes_than_the_exported_graph_is_for_run_the_model(exported: tuple[nn.Module, Any]) -> None:
    model, gm = exported
    check_equal(model, gm, image(2, 3, 3, 8))
    check_equal(model, gm, x=image(2, 3, 8, 8))


def test_export_of_a_model_with_constants_inside_a_submodule() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.tensor([1.0, 2.0, 3.0]) if x.shape[0] > 1 else x

    model = model_of(lambda m, x: m.i(m.l(x)), i=Inner(), l=nn.Linear(7, 3))
    gm = compile_graph(model, (image(),))
    assert not gm.leaves
    check_equal(model, gm, image())


class Chooses(nn.Module):
    """Two branches, which torch.export lets TorchDynamo compile: it puts the generator's state back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda a: self.linear(a), lambda a: a * 2, (x,))
        return self.last(y).relu()


def test_branches_of_cond_are_in_the_graph() -> None:
    model, x = Chooses().eval(), torch.ones(3, 16)
    fast = zendnn_cffi.optimize(model, example_inputs=(x,), tune="off")
    assert any(node.target is torch.ops.higher_order.cond for node in fast.graph.nodes)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model.last(model.linear(x)).relu())
        torch.testing.assert_close(fast(-x), model.last(-2 * x).relu())
    assert "inner_product" in str(zendnn_cffi.explain(fast))


class SumsRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nested.to_padded_tensor(self.linear(rows), 0.0)


def test_nested_tensors_may_be_examples() -> None:
    model, rows = SumsRows().eval(), torch.nested.nested_tensor([torch.ones(2, 16), torch.ones(3, 16)])
    fast = zendnn_cffi.optimize(model, example_inputs=(rows,), tune="off")
    with torch.no_grad():
        torch.testing.assert_close(fast(rows), model(rows))
