"""Constants around gated values go to the gate, which is small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from fx_passes import ops
from fx_passes.fold.gates import fold_gates
from tests.support.graphs import after, calls, check, check_twice, image, model_of
from tests.support.lowering import net, noise, offload

Forward = Callable[..., Any]


def norms(x: torch.Tensor, dims: tuple[int, ...] = (2, 3), keepdim: bool = True) -> torch.Tensor:
    return torch.linalg.vector_norm(x, 2, dims, keepdim)


def gate(x: torch.Tensor) -> torch.Tensor:
    found = norms(x)
    return found / (found.mean(1, keepdim=True) + 1e-6)


# what is computed -> operations on all of x that are left
FOLDED: dict[str, tuple[Forward, int]] = {
    "as ConvNeXt V2": (lambda m, x: x + torch.addcmul(m.b, m.w, x * gate(x)), 2),
    "the other way round": (lambda m, x: (gate(x) * x * m.w + m.b) + x, 2),
    "without a residual": (lambda m, x: m.w * (x * gate(x)) + m.b, 2),
    "without a factor": (lambda m, x: x + (m.b + x * gate(x)), 2),
    "a factor alone": (lambda m, x: (x * gate(x)) * m.w, 1),
    "a gate of several": (lambda m, x: (x * (norms(x) + x.mean((2, 3), keepdim=True).sigmoid())) * m.w, 1),
    "constants as vectors": (lambda m, x: (y := x.permute(0, 2, 3, 1)) * norms(y, (1, 2)) * m.v, 1),
}
LEFT: dict[str, tuple[Forward, int]] = {
    "a product that others read": (lambda m, x: ((y := x * gate(x)), m.w * y), 2),
    "a sum that others read": (lambda m, x: ((y := m.b + x * gate(x)), x + y), 3),
    "another residual": (lambda m, x: m.c(x) + (m.b + x * gate(x)), 3),
    "no constant": (lambda m, x: x.relu() * (x * gate(x)), 2),
    "a constant for each pixel": (lambda m, x: m.p * (x * gate(x)), 2),
    "a gate that is not small": (lambda m, x: m.w * (x * m.c(x)), 2),
    "without its dimensions": (lambda m, x: m.w * (x * norms(x, (0, 1, 2, 3), False)), 2),
    "a difference": (lambda m, x: x - (m.b + x * gate(x)), 3),
    "written between": (lambda m, x: _written_between(m, x), 3),
}


def _written_between(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * gate(x)
    x[:, :1].mul_(2)
    found: torch.Tensor = (y * m.w) + x
    return found


def model(forward: Forward) -> nn.Module:
    found = model_of(lambda m, x: forward(m, m.a(x)), a=nn.Conv2d(3, 4, 1), c=nn.Conv2d(4, 4, 1))
    found.w, found.b = nn.Parameter(image(1, 4, 1, 1)), nn.Parameter(image(1, 4, 1, 1, seed=1))
    found.v, found.p = nn.Parameter(image(4)), nn.Parameter(image(5, 7))
    return found


def large(gm: fx.GraphModule, x: torch.Tensor) -> int:
    """How many binary operations have as many numbers as x has pixels and channels."""
    sizes: list[int] = []

    class Sized(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            found = super().run_node(n)
            if n.op == "call_function" and n.target is ops.binary:
                sizes.append(found.numel())
            return found

    Sized(gm).run(x)
    return sizes.count(x.numel() // 3 * 4)


@pytest.mark.parametrize("case", [*FOLDED, *LEFT])
@pytest.mark.parametrize("exported", [False, True])
def test_gates(case: str, exported: bool) -> None:
    forward, left = {**FOLDED, **LEFT}[case]
    x = image(2, 3, 5, 7)
    check(model(forward), x)
    gm = after("fold_gates", model(forward), (x,) if exported else None)
    with torch.no_grad():
        assert large(gm, x) == left
    check_twice(gm, fold_gates)


def test_other_dtypes_are_left() -> None:
    """The constant would be rounded, or the gate widened, where it is multiplied."""
    given = model(lambda m, x: m.w * (x * gate(x)))
    given.w = nn.Parameter(image(1, 4, 1, 1).float())
    gm = after("fold_gates", given)
    assert [n.args[2] for n in calls(gm) if n.target is ops.binary][-2:] == ["mul", "mul"]
    x = image(2, 3, 5, 7)
    with torch.no_grad():
        assert large(gm, x) == 2
        torch.testing.assert_close(gm(x), given(x))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_in_regions(dtype: torch.dtype | None) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m[0](x).relu()
        found: torch.Tensor = m[2](x + torch.addcmul(m[1].bias[:, None, None], m[1].weight[:, None, None], x * gate(x)))
        return found

    given = net(forward, nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 1))
    found = offload(given, noise(2, 3, 9, 8), dtype=dtype)
    assert [node.became for node in found.nodes].count("convolution") == 2
