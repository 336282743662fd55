"""What the tests of the passes share: run the pipeline on plain-torch regions, compare with eager, look inside."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fx_passes.graph.verify import verify
from fx_passes.module import OptimizedModule
from fx_passes.normalize import normalize
from fx_passes.pipeline import PASSES, build, compile_graph
from fx_passes.trace.trace import ExampleInputs, trace
from tests.support.torchvision_models import randomize


def model_of(function: Callable[..., Any], **children: nn.Module) -> nn.Module:
    """A model in evaluation mode, in float64, whose forward is function(self, ...), with random statistics."""

    class Model(nn.Module):
        forward = function

    model = Model()
    for name, child in children.items():
        model.add_module(name, child)
    randomize(model.eval())
    return model.double()


def image(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random float64 values."""
    return torch.randn(shape or (2, 3, 9, 7), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def traced(model: nn.Module, *inputs: torch.Tensor) -> fx.GraphModule:
    """The normalized graph of model with meta["val"] on every node, as torch.export would leave it."""
    gm = fx.symbolic_trace(model)

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            n.meta["val"] = super().run_node(n)
            return n.meta["val"]

    Recorder(gm).run(*inputs)
    return normalize(gm)


def check(model: nn.Module, *inputs: Any, **kwargs: Any) -> OptimizedModule:
    """Compile model, check that the result equals eager (inputs included, where they are written to), return it."""
    gm = compile_graph(model)
    check_equal(model, gm, *inputs, **kwargs)
    return gm


def check_equal(model: nn.Module, gm: nn.Module, *inputs: Any, **kwargs: Any) -> None:
    """Compare a compiled model with eager; verify its graphs and its state."""
    verify(gm)
    mine, theirs = copy.deepcopy((inputs, kwargs)), copy.deepcopy((inputs, kwargs))
    with torch.no_grad():
        expected, actual = copy.deepcopy(model)(*theirs[0], **theirs[1]), gm(*mine[0], **mine[1])
    _assert_same(actual, expected)
    _assert_same(mine, theirs)
    state, original = gm.state_dict(), model.state_dict()
    assert list(state) == list(original)


def _assert_same(actual: Any, expected: Any) -> None:
    """Equal structures, tensors as close as float64 computes them."""
    leaves, structure = pytree.tree_flatten(actual)
    others, other_structure = pytree.tree_flatten(expected)
    assert structure == other_structure
    for leaf, other in zip(leaves, others, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(leaf, other, rtol=1e-10, atol=1e-12)
        else:
            assert leaf == other


def after(passes: str, model: nn.Module, example_inputs: ExampleInputs = None) -> fx.GraphModule:
    """model's graph after the passes up to the named one, before it is cut into regions."""
    gm: Any = OptimizedModule(trace(model, example_inputs), build, {})
    for run_pass in PASSES:
        gm = run_pass(gm)
        verify(gm)
        if run_pass.__name__ == passes:
            break
    return gm


def calls(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Every call of a function, method or module outside and inside regions, regions themselves left out."""
    for graph in (gm.graph, *(r.graph for r in getattr(gm, "regions", dict)().values())):
        yield from (n for n in graph.nodes if n.op.startswith("call_") and not str(n.target).startswith("zen_region"))


def count(gm: fx.GraphModule) -> Counter[str]:
    """How often each operation occurs, taking results apart left out."""
    return Counter(name_of(node) for node in calls(gm) if name_of(node) != "getitem")


def outside(gm: OptimizedModule) -> Counter[str]:
    """Operations that stayed outside regions."""
    nodes = (n for n in gm.graph.nodes if n.op.startswith("call_") and not str(n.target).startswith("zen_region"))
    return Counter(name_of(node) for node in nodes if name_of(node) != "getitem")


def name_of(node: fx.Node) -> str:
    """Function name, method name or module path."""
    return node.target if isinstance(node.target, str) else node.target.__name__


def post_ops(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """The post-ops of each node that has a place for them, names and kinds only."""
    return [
        tuple(":".join(map(str, entry[:2])) if entry[0] != "prelu" else "prelu" for entry in node.kwargs["post_ops"])
        for node in calls(gm)
        if "post_ops" in node.kwargs
    ]


def check_twice(gm: fx.GraphModule, run_pass: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
    """A pass that has run has nothing left to do."""
    first = str(run_pass(gm).graph)
    assert str(run_pass(gm).graph) == first
