"""Linear layers as torch.export's decompositions spell them: rows, a matrix product, the shape again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from tests.support.lowering import check_regions, noise, tensors
from tests.support.quantized import ran

FREE = torch.export.Dim.DYNAMIC


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 16, bias=False), nn.ReLU()).eval()


class Spelled(nn.Module):
    """function(x, weight [16, 24], bias [16])."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.weight, self.bias = nn.Parameter(torch.randn(16, 24) / 5), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.weight, self.bias)


def kinds(fast: Any) -> list[str]:
    return [kind for kind, _, _ in ran(fast)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("free", [(), (0, 1)])
@pytest.mark.parametrize("shape", [(3, 5, 24), (2, 3, 5, 24), (6, 24)])
def test_decomposed_layers_absorb_what_follows(shape: tuple[int, ...], free: tuple[int, ...], dtype: Any) -> None:
    model, x = mlp().to(dtype), noise(*shape, dtype=dtype)
    sizes = ({dim: FREE for dim in free if dim < len(shape) - 1},) if free else None
    program = torch.export.export(model, (x,), dynamic_shapes=sizes).run_decompositions()
    assert "aten.addmm" in str(program.graph) and "aten.linear" not in str(program.graph)
    fast = zendnn_cffi.optimize(program, tune="off")
    tolerance = {"rtol": 1.6e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    with torch.no_grad():
        sources = (x, torch.cat((x, -x, x))) if free else (x,)
        for source in sources:
            torch.testing.assert_close(fast(source), model(source), **tolerance)
    assert len(ran(fast)) == 2 * len(sources) and {*kinds(fast)} <= {"inner_product", "matmul"}
    check_regions(fast)


def by_hand(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu((x.reshape(-1, 24) @ weight.t()).reshape(*x.shape[:-1], 16) + bias)


def test_written_by_hand() -> None:
    model, x = Spelled(by_hand).eval(), noise(3, 5, 24)
    fast = zendnn_cffi.optimize(torch.export.export(model, (x,)), tune="off")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert len(ran(fast)) == 1 and {*kinds(fast)} <= {"inner_product", "matmul"}


OTHERS: dict[str, Callable[..., Any]] = {
    "other sizes": lambda x, w, b: F.linear(x.reshape(-1, 24), w, b).reshape(5, 3, 16).relu(),
    "features joined": lambda x, w, b: F.linear(x.reshape(-1, 24), w, b).reshape(3, 80).relu(),
    "other rows": lambda x, w, b: F.linear(x.transpose(1, 2).reshape(-1, 24), w, b).reshape(3, 5, 16).relu(),
    "rows are read": lambda x, w, b: (y := F.linear(x.reshape(-1, 24), w, b), y.reshape(3, 5, 16).relu()),
    "features of two dimensions": lambda x, w, b: F.linear(
        x.reshape(3, 5, 6, 4).permute(0, 1, 3, 2).reshape(15, 24), w, b
    ).reshape(3, 5, 16),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_right(name: str) -> None:
    model, x = Spelled(OTHERS[name]).eval(), noise(3, 5, 24)
    fast = zendnn_cffi.optimize(torch.export.export(model, (x,)), tune="off")
    with torch.no_grad():
        for ours, theirs in zip(tensors(fast(x)), tensors(model(x)), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert {"inner_product", "matmul"} & {*kinds(fast)}
