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
from tests.support.lowering import net, noise, offload, oracle
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
def test_every_candidate_rounds_behind_the_weight(dtype: torch.dtype) -> None:
    """A weight of 1 + w with small w: it would be 1 in bf16, and the result off by half a unit in the last place."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), 1 + noise(64).clamp(-0.9, 0.9) * 2**-8
    graph.output(graph.call_function(ops.rms_norm, (x, graph.get_attr("w")), {"eps": 1e-6, "rounds_last": True}))
    (operation,), values = lower_graph(graph, [TensorSpec.of(torch.empty(3, 5, 64, dtype=dtype))], {"w": weight})
    assert operation.spec.dtype == dtype
    assert operation.candidates[-1].implementation == "torch" and len(operation.candidates) > 1
    for candidate in operation.candidates:
        result = Bench(operation, values).check_and_time(candidate)
        assert result.right and result.error <= (2**-8 if dtype == torch.bfloat16 else TOLERANCE[dtype])


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


@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    "norm",
    (
        lambda y: F.normalize(y, p=2, dim=1),
        lambda y: F.normalize(y, dim=-1, eps=0.7),
        lambda y: y / y.norm(2, -1, True),
    ),
    ids=("normalize", "an eps", "a quotient"),
)
def test_l2_normalization_in_primitives(norm: Any, dtype: torch.dtype | None) -> None:
    found = offload(net(lambda m, x: norm(m[0](x)), nn.Linear(8, 40)), noise(3, 8), dtype=dtype, tune="off")
    (node,) = [node for node in found.nodes if node.became == "l2_normalize"]
    assert node.implementation != "torch"


def test_another_norm_is_pytorch() -> None:
    found = offload(net(lambda m, x: F.normalize(m[0](x), p=1.0, dim=-1), nn.Linear(8, 40)), noise(3, 8), tune="off")
    assert not [node for node in found.nodes if node.became == "l2_normalize"]


def test_parts_that_export_leaves() -> None:
    class Conditional(nn.Module):
        """Cannot be traced symbolically."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 40)

        def forward(self, x: Tensor) -> Tensor:
            return F.normalize(self.linear(x * 2 if x.shape[0] > 99 else x), p=2, dim=1)

    model, x = Conditional().eval(), noise(3, 8)
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert [node.became for node in zendnn_cffi.explain(fast).nodes].count("l2_normalize") == 1


@pytest.mark.parametrize("eps", (1e-12, 0.0, 1e-3))
def test_rows_without_a_length(eps: float) -> None:
    """Zeros stay zeros, or are no numbers without an eps; short rows are divided by eps."""
    model = net(lambda m, x: F.normalize(m[0](x), dim=-1, eps=eps), nn.Linear(8, 24, bias=False))
    x = noise(4, 8) * torch.tensor([[1.0], [0.0], [1e-5], [1e-14]])
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), equal_nan=True)


def test_along_another_dimension_is_pytorch() -> None:
    model = net(lambda m, x: F.normalize(m[0](x), dim=1), nn.Conv2d(3, 16, 3))
    found = offload(model, noise(2, 3, 9, 9), tune="off")
    (norm,) = [node for node in found.nodes if "normalize" in node.name]
    assert norm.became == "torch"
