"""What passes believe of shapes and dtypes, meta["val"], stays right, and verify notices where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fx_passes import ops
from fx_passes.graph.verify import VerificationError, verify
from fx_passes.module import OptimizedModule
from fx_passes.pipeline import PASSES, build, compile_graph
from fx_passes.trace.trace import trace
from tests.support import torchvision_models
from tests.support.exported import needs_export
from tests.support.graphs import check_equal, count, image, model_of, outside, post_ops

BACK = (0, 3, 1, 2)


MODELS: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "permute passes an activation": (lambda m, x: m.l(x).permute(BACK).relu(), {"permute": 1, "eltwise": 0}),
    "permute passes a residual": (
        lambda m, x: m.l(x).permute(BACK) + x.permute(0, 2, 1, 3).permute(0, 3, 2, 1),
        {"permute": 1, "binary": 0},
    ),
    "a residual with more dimensions": (lambda m, x: m.l(x[0]) + x, {"binary": 0}),
    "a residual that is broadcast": (lambda m, x: m.l(x) * x[:, :1], {"binary": 0}),
    "an activation": (lambda m, x: m.l(x).tanh(), {"eltwise": 0}),
}


class Exported(nn.Module):
    """A model that torch.fx cannot trace."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.eval()

    def forward(self, x: Tensor) -> Any:
        if needs_export(x) and x.shape[-1] > 1000:
            raise ValueError("too wide")
        return self.inner(x)


def exported(model: nn.Module, *inputs: Tensor, each: bool = True) -> fx.GraphModule:
    """The model's exported graph after all passes, verified; each: after each of them."""
    gm: Any = OptimizedModule(trace(Exported(model).eval(), inputs), build, {})
    for run_pass in PASSES:
        gm = run_pass(gm)
        if each or run_pass is PASSES[-1]:
            verify(gm)
    return gm


@pytest.mark.parametrize("name", MODELS)
def test_examples_follow_what_passes_do(name: str) -> None:
    function, expected = MODELS[name]
    model, x = model_of(function, l=nn.Linear(7, 7)), image(2, 7, 7, 7)
    gm = exported(model, x)
    counted = count(gm)
    assert {kind: counted[kind] for kind in expected} == expected
    assert all(isinstance(n.meta.get("val"), Tensor) for n in gm.graph.nodes if n.target in ops.COMPUTE)


@pytest.mark.parametrize("name", ("convnext_tiny", "mobilenet_v3_small"))
def test_examples_of_architectures(name: str) -> None:
    model = torchvision_models.build(name)
    gm = exported(model, torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)), each=False)
    assert sum("val" in node.meta for node in gm.graph.nodes) > 20


@pytest.mark.parametrize("shape, entries", [((7,), 0), ((2, 7), 1), ((1, 7), 0)], ids=str)
def test_what_addmm_adds_is_a_bias_only_if_it_is_a_vector(shape: tuple[int, ...], entries: int) -> None:
    model = model_of(lambda m, x: torch.addmm(m.k, x, m.l.weight.t()), l=nn.Linear(7, 7, bias=False))
    model.k = nn.Parameter(image(*shape))
    x = image(2, 7, seed=1)
    gm = compile_graph(Exported(model).eval(), (x,))
    check_equal(Exported(model).eval(), gm, x)
    assert [len(ops) for ops in post_ops(gm)] == [entries] and not outside(gm)["addmm"]


@pytest.mark.parametrize("wrong", ("shape", "dtype"))
def test_verify_names_a_wrong_example(wrong: str) -> None:
    model = model_of(lambda m, x: m.l(x).tanh(), l=nn.Linear(7, 7))
    gm = exported(model, image(2, 7, 7, 7))
    (node,) = gm.graph.find_nodes(op="call_function", target=ops.linear)
    value = torch.empty(2, 7, 7, 8 if wrong == "shape" else 7, dtype=torch.float64)
    node.meta["val"] = value if wrong == "shape" else value.float()
    with pytest.raises(VerificationError, match=r"meta\['val'\] says"):
        verify(gm)
