"""A forward that computes from parameters which torch.fx hands out as they are follows writes to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.trace.computed import computing_noted
from fx_passes.trace.trace import trace
from tests.support.lowering import net, noise


class Held(nn.Module):
    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", noise(8))
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


# Each computes from tensors that it does not read by their names.
COMPUTED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "all parameters": lambda m, x: m.first(x) + sum(p.sum() for p in m.parameters()),
    "a buffer by name": lambda m, x: m.first(x) * (dict(m.named_buffers())["scale"] * 2),
    "the state": lambda m, x: m.first(x) + m.state_dict()["second.weight"].sum(),
    "a number": lambda m, x: m.first(x) * float(next(m.second.parameters()).detach().sum()),
    "a branch": lambda m, x: m.first(x) if next(m.second.parameters()).sum() > 0 else m.second(x),
    "a dictionary of parameters": lambda m, x: m.first(x) * m.second._parameters["weight"].sum(),
    "a dictionary of buffers": lambda m, x: m.first(x) * (m._buffers["scale"] + 1),
    "a vector": lambda m, x: m.first(x) + nn.utils.parameters_to_vector(m.second.parameters()).detach().norm(),
}
# These ask what writes do not change, or are nodes of a graph.
TRACED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a dtype": lambda m, x: m.first(x).to(next(m.parameters()).dtype),
    "numbers of elements": lambda m, x: m.first(x) * sum(p.numel() for p in m.parameters()),
    "by name": lambda m, x: m.first(x) + m.second.weight.sum() * m.scale,
    "as they are in a dictionary": lambda m, x: m.first(x) @ m.second._parameters["weight"] + m._buffers["scale"],
    "beside a traced value": lambda m, x: m.first(x) + next(m.buffers()),
}


@pytest.mark.parametrize("case", [*COMPUTED, *TRACED])
def test_writes_are_followed(case: str) -> None:
    compute = (COMPUTED | TRACED)[case]
    model, x = Held(compute).eval(), noise(4, 8)
    fast: Any = zendnn_cffi.optimize(copy.deepcopy(model), tune="off")
    with torch.no_grad():
        for step in range(4):
            torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)
            for m in (model, fast):
                m.second.weight.mul_(-2.0 - step)
                m.scale.add_(1.0)
            for _ in range(2):
                torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", [*COMPUTED, *TRACED])
def test_graphs_without_an_example_are_of_those_that_compute_nothing(case: str) -> None:
    graph = trace(Held((COMPUTED | TRACED)[case]).eval()).graph
    assert (graph is None) == (case in COMPUTED)


def test_functions_that_ask_what_they_are_given_are_traced() -> None:
    """PyTorch's own ask a traced value for its class, which it cannot tell, where a mode is around them."""
    model = net(lambda m, x: torch.vstack(m[0](x).chunk(2, 1)), nn.Linear(8, 8))
    assert trace(model).graph is not None


def test_what_is_noted() -> None:
    model = Held(TRACED["a dtype"])
    with computing_noted(model) as found:
        torch.cat([noise(3), model.scale])
        assert not found  # nobody was handed anything
        next(model.parameters())
        model.scale.size(), model.scale.dtype, model.scale.is_contiguous(), noise(8) + 1
        assert not found
        torch.cat([noise(3), model.scale])
        model.scale.tolist()
    assert found == ["cat", "tolist"]
