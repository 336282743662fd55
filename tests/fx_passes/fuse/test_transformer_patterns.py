"""Projections, RMSNorm and rotary embedding as models write them; and what only looks like them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from fx_passes import ops
from fx_passes.fold.casts import fold_casts
from fx_passes.fuse.projections import fuse_projections
from fx_passes.fuse.rms_norm import fuse_rms_norm
from fx_passes.fuse.rotary import fuse_rotary
from fx_passes.normalize import normalize


def traced(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    """The normalized graph of model with meta["val"] on every node, as torch.export would leave it."""
    gm = fx.symbolic_trace(model)
    for node, value in _values(gm, *inputs).items():
        node.meta["val"] = value
    return normalize(gm)


def _values(gm: fx.GraphModule, *inputs: Tensor) -> dict[fx.Node, object]:
    found: dict[fx.Node, object] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            found[n] = super().run_node(n)
            return found[n]

    Recorder(gm).run(*inputs)
    return found


def count(gm: fx.GraphModule) -> Counter[object]:
    return Counter(node.target for node in gm.graph.nodes if node.op == "call_function")


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32)
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def test_rms_norm() -> None:
    model, x = Norm().eval(), torch.randn(2, 3, 8)
    gm = fuse_rms_norm(fold_casts(traced(model, x)))
    assert count(gm)[ops.rms_norm] == 1
    assert count(gm)[ops.binary] == 0
    torch.testing.assert_close(gm(x), model(x))
    again = str(gm.graph)
    assert str(fuse_rms_norm(gm).graph) == again


def test_normalization_over_another_dimension_is_none() -> None:
    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)

    x = torch.randn(2, 3, 8)
    gm = fuse_rms_norm(traced(Other(), x))
    assert count(gm)[ops.rms_norm] == 0
    torch.testing.assert_close(gm(x), Other()(x))


class Rotate(nn.Module):
    def __init__(self, half: int) -> None:
        super().__init__()
        self.half = half

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., self.half :], x[..., : self.half]), -1) * sin


def test_rotary() -> None:
    inputs = torch.randn(2, 3, 5, 8), torch.randn(5, 8), torch.randn(5, 8)
    for half, expected in ((4, 1), (3, 0)):  # only equal halves are a rotation
        gm = fuse_rotary(traced(Rotate(half), *inputs))
        assert count(gm)[ops.rotary] == expected
        torch.testing.assert_close(gm(*inputs), Rotate(half)(*inputs))


class Neighbours(nn.Module):
    """x * cos + turn(x) * sin, as GLM, Cohere, GPT-J and RoFormer turn x."""

    def __init__(self, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.turn = turn

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + self.turn(x) * sin


TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda x: torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2),
    "reshape_as": lambda x: torch.stack((-x[..., 1::2], x[..., 0::2]), -1).reshape_as(x),
    "aten": lambda x: torch.ops.aten.stack.default([-_second(x, 1), _second(x, 0)], -1).flatten(-2),
}
NO_TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "signs": lambda x: torch.stack((x[..., 1::2], x[..., ::2]), -1).flatten(-2),
    "order": lambda x: torch.stack((-x[..., ::2], x[..., 1::2]), -1).flatten(-2),
    "side by side": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -2).flatten(-2),
    "third ones": lambda x: torch.stack((-x[..., 1:8:2], x[..., 0:7:2]), -1).flatten(-2).roll(1, -1),
    "another tensor's shape": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).reshape_as(x.flip(0)),
    "rows": lambda x: torch.stack((-x[:, 1::2], x[:, ::2]), -1).reshape(x.shape),
}


def _second(x: Tensor, start: int) -> Tensor:
    result: Tensor = torch.ops.aten.slice.Tensor(x, 3, start, 2**63 - 1, 2)
    return result


@pytest.mark.parametrize("name", [*TURNS, *NO_TURNS])
def test_rotary_of_neighbours(name: str) -> None:
    inputs = torch.randn(2, 4, 4, 8), torch.randn(4, 8), torch.randn(4, 8)
    model = Neighbours({**TURNS, **NO_TURNS}[name])
    gm = fuse_rotary(traced(model, *inputs))
    assert [node.args[3] for node in gm.graph.find_nodes(op="call_function", target=ops.rotary)] == [True] * (
        name in TURNS
    )
    torch.testing.assert_close(gm(*inputs), model(*inputs))


class Projections(nn.Module):
    def __init__(self, bias: tuple[bool, bool, bool]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, n, bias=b) for n, b in zip((8, 4, 4), bias, strict=True))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(f(x).view(2, 3, -1, 4).transpose(1, 2) for f in (self.q, self.k, self.v))


def test_projections_of_one_input_become_one_linear() -> None:
    x = torch.randn(2, 3, 8)
    for bias in ((True, True, True), (True, False, True), (False, False, False)):
        model = Projections(bias).eval()
        gm = fuse_projections(traced(model, x))
        assert count(gm)[ops.linear] == 1
        assert set(gm.state_dict()) == set(model.state_dict())
        for actual, expected in zip(gm(x), model(x), strict=True):
            torch.testing.assert_close(actual, expected)


def test_projections_that_absorb_something_stay_apart() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.silu(self.gate(x)) * self.up(x)

    gm = fuse_projections(traced(Gated().eval(), torch.randn(2, 8)))
    assert count(gm)[ops.linear] == 2


def test_casts_that_change_something_stay() -> None:
    class Casts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.float32).to(torch.bfloat16).float()

    x = torch.randn(4)
    gm = fold_casts(traced(Casts(), x))
    assert len(gm.graph.find_nodes(op="call_method", target="to")) == 1
    torch.testing.assert_close(gm(x), Casts()(x))
