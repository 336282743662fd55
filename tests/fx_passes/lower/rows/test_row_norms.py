"""Rows divided by their norms: a layer normalization with given statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.lower.rules import lower_graph
from fx_passes.search.measure import TOLERANCE, Bench
from tests.support.lowering import noise, oracle
from tests.tolerance import assert_close


class Normed(nn.Module):
    """A linear layer behind the normalization, and one in front of it."""

    def __init__(self, width: int, affine: bool, eps: float | None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 8)
        self.weight = nn.Parameter(noise(width).abs() + 0.3) if affine else None
        self.width, self.eps = width, eps

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(F.rms_norm(self.first(x), (self.width,), self.weight, self.eps))
        return result


def calls(gm: Any) -> list[str]:
    (region,) = gm.regions().values()
    (lowered,) = region.lowered.values()
    return [call.kind for call in lowered.program.calls if call.kind != "reorder"]


@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("affine", (False, True))
@pytest.mark.parametrize("shape", ((1, 1, 16), (2, 7, 33), (3, 768), (1, 129, 64)), ids=str)
def test_in_primitives(shape: tuple[int, ...], affine: bool, dtype: torch.dtype | None) -> None:
    model, x = Normed(shape[-1], affine, 1e-3).eval(), noise(*shape[:-1], 8) * 3
    with torch.no_grad():
        gm = zendnn_cffi.optimize(model, (x,), dtype=dtype, tune="off")
        (expected,) = oracle(model, (x,))
        assert_close(gm(x), expected, dtype=dtype or torch.float32, k=shape[-1])
    first, *middle, last = calls(gm)
    assert {first, last} <= {"matmul", "inner_product"}
    assert middle in (["matmul", "layer_normalization"], ["eltwise", "matmul", "layer_normalization"])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("size", (1, 3, 17, 64, 770))
@pytest.mark.parametrize("target", (ops.rms_norm, ops.l2_normalize))
def test_every_candidate_gives_the_same_numbers(target: Any, size: int, dtype: torch.dtype) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    args = (x, graph.get_attr("w")) if target is ops.rms_norm else (x, -1)
    graph.output(graph.call_function(target, args, {"eps": 1e-6}))
    values: RegionValues
    (operation,), values = lower_graph(
        graph, [TensorSpec.of(torch.empty(3, 5, size))], {"w": noise(size) + 2}, compute_dtype=dtype
    )
    assert operation.candidates[-1].implementation == "torch" and len(operation.candidates) > 1
    for candidate in operation.candidates:
        result = Bench(operation, values).check_and_time(candidate)
        assert result.right and result.error <= TOLERANCE[dtype], candidate.implementation


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_eps_is_that_of_the_dtype_computed_in(dtype: torch.dtype) -> None:
    """Of numbers so small that it matters."""
    model, x = Normed(24, True, None).eval().to(dtype), (noise(5, 8) * 1e-4).to(dtype)
    nn.init.zeros_(model.first.bias)
    with torch.no_grad():
        gm = zendnn_cffi.optimize(model, (x,), tune="off")
        model.eps = torch.finfo(torch.float32).eps
        (expected,) = oracle(model, (x,))
        assert_close(gm(x), expected, dtype=dtype, k=64)
    assert "layer_normalization" in calls(gm)


def test_a_row_of_zeros_and_large_numbers() -> None:
    model = Normed(24, True, 1e-5).eval()
    nn.init.zeros_(model.first.bias)
    x = torch.stack([torch.zeros(8), noise(8) * 1e15])
    with torch.no_grad():
        gm = zendnn_cffi.optimize(model, (x,), tune="off")
        assert_close(gm(x), model(x), k=24)
