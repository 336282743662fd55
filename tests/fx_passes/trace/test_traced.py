"""What tracing leaves: for which calls the graph is right, how it takes their arguments, and copies of it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from fx_passes.pipeline import compile_graph
from fx_passes.trace.export import export
from fx_passes.trace.trace import trace
from fx_passes.trace.traced import Traced, forward_signature
from tests.support.exported import needs_export
from tests.support.graphs import check, check_equal, count, image, model_of, post_ops


def _options(m: Any, x: torch.Tensor, mask: Any = None, flag: bool = False, scale: float = 2.0) -> Any:
    y = m.c(x) * scale
    if mask is not None:
        y = y * mask
    return y.relu() if flag else y


def test_default_arguments() -> None:
    model = model_of(_options, c=nn.Conv2d(3, 3, 1))
    gm = check(model, image())
    mask = image(7)
    assert count(gm)["convolution"] == 1
    for args, kwargs in [
        ((image(), mask), {}),
        ((image(),), {"mask": mask, "scale": 3.0}),
        ((image(), None, True), {}),
        ((), {"x": image(), "flag": False}),
    ]:
        check_equal(model, gm, *args, **kwargs)


def test_example_inputs_say_which_options_are_given() -> None:
    model = model_of(_options, c=nn.Conv2d(3, 3, 1))
    check_equal(model, compile_graph(model, (image(), None, True)), image(), None, True)
    for example in [(image(), image(7)), {"x": image(), "mask": image(7)}]:
        gm = compile_graph(model, example)
        assert post_ops(gm) == [("binary:mul", "binary:mul")]
        check_equal(model, gm, image(), image(7))
        check_equal(model, gm, image())


@pytest.mark.parametrize("example", [(), (None,), (None, False), {"scale": 2.0}], ids=str)
def test_a_default_is_as_good_as_nothing_for_a_graph_by_an_example(example: Any) -> None:
    """Calls of one kind, whatever of their arguments the example gave: none of them needs a graph of its own."""

    torch.manual_seed(0)
    model, x = model_of(_options, c=nn.Conv2d(3, 3, 1)), image()
    args, kwargs = ((x,), example) if isinstance(example, dict) else ((x, *example), {})
    graph, guards = export(model, args, kwargs)
    traced = Traced(model, graph, guards=guards, example=(args, kwargs))
    for call in [((x,), {}), ((x, None), {}), ((), {"x": x}), ((x,), {"scale": 2.0, "flag": False})]:
        arranged = traced.arrange(*call)
        assert arranged is not None and len(arranged[0]) == len(args) and arranged[1].keys() == kwargs.keys()
        assert all(leaf is x or leaf in (None, False, 2.0) for leaf in (*arranged[0], *arranged[1].values()))
    for call in [((x, x), {}), ((x,), {"flag": True}), ((x,), {"scale": 3.0}), ((x,), {"other": None}), ((), {})]:
        assert traced.arrange(*call) is None


class Scaled(nn.Module):
    """A network with an option for each kind of argument that a graph can be for."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor, mask: Any = None, mode: str = "relu", scale: float = 2.0) -> Any:
        y = self.conv(x) * scale
        y = y if mask is None else y * mask
        return y.relu() if mode == "relu" else y


CALLS: dict[str, tuple[Any, ...]] = {
    "by position": ((image(),), {}, True),
    "by name": ((), {"x": image()}, True),
    "the default, given": ((image(), None, "relu"), {"scale": 3.0}, True),
    "another mode": ((image(),), {"mode": "none"}, False),
    "a mask": ((image(), image()), {}, False),
    "a mode of another type that is equal": ((image(),), {"mode": type("Text", (str,), {})("relu")}, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_which_calls_a_graph_is_for(name: str) -> None:
    args, kwargs, is_for = CALLS[name]
    assert trace(Scaled().eval()).arrange(args, kwargs) == ((args, kwargs) if is_for else None)


def test_an_exported_graph_takes_arguments_as_the_example_had_them() -> None:
    x, mask = image(), image()
    traced = trace(Branching().eval(), {"x": x, "mask": mask})
    assert traced.guards is not None and traced.example is not None
    expected = traced.arrange((), {"x": x, "mask": mask})
    assert expected is not None
    for args, kwargs in (((x, mask), {}), ((x,), {"mask": mask}), ((), {"mask": mask, "x": x})):
        found = traced.arrange(args, kwargs)
        assert found is not None and found[0] == expected[0] == () and [*found[1]] == ["x", "mask"]
        assert found[1]["x"] is x and found[1]["mask"] is mask
    assert traced.arrange((x,), {}) is None
    assert traced.arrange((x.half(), mask.half()), {}) is None


class Branching(nn.Module):
    """Symbolic tracing cannot follow it."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x.shape[1]) if needs_export(x) else 0):
            x = x * mask
        return x


@pytest.mark.parametrize("again", [lambda t: t.copy(copy.deepcopy(t.root)), lambda t: pickle.loads(pickle.dumps(t))])
@pytest.mark.parametrize("is_exported", [False, True])
def test_copies_have_nodes_of_their_own(again: Any, is_exported: bool) -> None:
    x, mask = image(), image()
    model = Branching() if is_exported else Scaled()
    traced = trace(model.eval(), (x, mask))
    other: Traced = again(traced)
    assert (traced.guards is not None) == is_exported
    assert traced.graph is not None and other.graph is not None and other.root is not traced.root
    assert [str(n) for n in other.graph.nodes] == [str(n) for n in traced.graph.nodes]
    assert not {*other.graph.nodes} & {*traced.graph.nodes}
    assert other.arrange((x, mask), {}) is not None and other.arrange((x,), {}) is None


def test_signatures() -> None:
    assert [*forward_signature(Scaled()).parameters] == ["x", "mask", "mode", "scale"]
    builtin = nn.Linear(2, 2)
    builtin.forward = torch.relu  # type: ignore[method-assign]
    assert [*forward_signature(builtin).parameters] == ["args", "kwargs"]
