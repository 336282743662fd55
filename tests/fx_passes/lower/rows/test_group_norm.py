"""Group normalization, as rows of groups and a product per channel behind them."""

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
from fx_passes.pipeline import compile_graph
from fx_passes.search.measure import TOLERANCE, Bench
from tests.support.lowering import Net, kinds, net, noise, offload

SHAPES = ((1, 6, 5, 7), (2, 32, 9, 9), (3, 4, 1, 1), (2, 12, 17), (1, 8, 3, 5, 2), (5, 10))


def norm(groups: int, channels: int, affine: bool = True) -> nn.GroupNorm:
    module = nn.GroupNorm(groups, channels, eps=1e-3, affine=affine)
    if affine:
        module.weight.data.copy_(noise(channels, seed=1).abs() + 0.3)
        module.bias.data.copy_(noise(channels, seed=2))
    return module


@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("affine", (False, True))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("groups", (1, 2))
def test_in_primitives(shape: tuple[int, ...], groups: int, affine: bool, dtype: torch.dtype | None) -> None:
    model = net(lambda m, x: m[0](x * 2), norm(groups, shape[1], affine))
    explanation = offload(model, noise(*shape) * 3, dtype=dtype, k=shape[1])
    one_pixel = (
        affine and all(n == 1 for n in shape[2:]) and len(shape) > 2
    )  # the library's product per channel is wrong
    assert ("torch" if one_pixel else "group_norm") in kinds(explanation)


@pytest.mark.parametrize("weight, bias", ((True, False), (False, True)))
def test_weight_or_bias_alone(weight: bool, bias: bool) -> None:
    class Half(Net):
        def forward(self, x: Tensor) -> Tensor:
            return F.group_norm(x + 1, 3, self.m[0].weight if weight else None, self.m[0].bias if bias else None)

    explanation = offload(Half(lambda: None, (norm(3, 9),)).eval(), noise(2, 9, 5, 5), k=9)
    assert "group_norm" in kinds(explanation)


@pytest.mark.parametrize("affine", (False, True))
@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
def test_what_follows_is_absorbed_where_a_second_primitive_takes_it(dtype: torch.dtype | None, affine: bool) -> None:
    """A residual block of a diffusion network: norm, swish, convolution, and the sum."""
    conv = nn.Conv2d(16, 16, 3, padding=1)
    model = net(lambda m, x: x + m[1](F.silu(m[0](x)) * 2), norm(4, 16, affine), conv)
    explanation = offload(model, noise(2, 16, 11, 7), dtype=dtype)
    assert ("eltwise" in kinds(explanation)) == (not affine)
    assert "torch" not in kinds(explanation)


SPELLINGS: dict[str, Any] = {
    "module": lambda m, x: m[0](x),
    "functional": lambda m, x: F.group_norm(x, 2, m[0].weight, m[0].bias, 1e-3),
    "torch": lambda m, x: torch.group_norm(x, 2, m[0].weight, m[0].bias, 1e-3),
    "aten": lambda m, x: torch.ops.aten.group_norm.default(x, 2, m[0].weight, m[0].bias, 1e-3),
    "native": lambda m, x: torch.ops.aten.native_group_norm.default(
        x, m[0].weight, m[0].bias, 2, 6, 35, 2, 1e-3
    )[0],
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("exported", (False, True))
def test_every_spelling_is_the_one_operation(spelling: str, exported: bool) -> None:
    spelled, x = SPELLINGS[spelling], noise(2, 6, 5, 7)
    model = net((lambda m, x: spelled(m, x) if x.shape[0] > 1 else x) if exported else spelled, norm(2, 6))
    gm = compile_graph(model, (x,))
    assert (gm._source[0].example is not None) == exported
    (region,) = gm.regions().values()
    assert [node.target for node in region.graph.nodes if node.op == "call_function"] == [ops.group_norm]
    torch.testing.assert_close(gm(x), model(x))


def test_a_number_of_groups_known_at_run_time_alone_stays_as_it_is() -> None:
    model, x = net(lambda m, x: F.group_norm(x, x.shape[0]) * 2), noise(2, 6, 5, 7)
    gm = compile_graph(model)
    assert not any(node.target is ops.group_norm for node in gm.graph.nodes)
    torch.testing.assert_close(gm(x), model(x))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("shape, groups", (((2, 8, 6, 5), 2), ((1, 33, 7, 7), 1), ((2, 64, 8, 8), 32)), ids=str)
def test_every_candidate_gives_the_same_numbers(shape: tuple[int, ...], groups: int, dtype: torch.dtype) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    parameters = {"weight": noise(shape[1], seed=1), "bias": noise(shape[1], seed=2)}
    constants = [graph.get_attr(name) for name in parameters]
    graph.output(graph.call_function(ops.group_norm, (x, groups, *constants), {"eps": 1e-5, "post_ops": ()}))
    spec = TensorSpec.of(noise(*shape))
    operations, _ = lower_graph(graph, (spec,), parameters, compute_dtype=dtype)
    (operation,) = operations
    names = {candidate.implementation for candidate in operation.candidates}
    assert "torch" in names and len(names) > 1
    bench = Bench(operation, RegionValues(graph, (spec,), parameters))
    for candidate in operation.candidates:
        result = bench.check_and_time(candidate)
        assert result.right and result.error <= TOLERANCE[dtype], candidate.implementation


def test_a_diffusion_block_is_one_region() -> None:
    class Residual(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.norms = nn.ModuleList(norm(8, channels) for _ in range(2))
            self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
            self.time = nn.Linear(12, channels)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            h = self.convs[0](F.silu(self.norms[0](x))) + self.time(F.silu(t))[:, :, None, None]
            result: Tensor = x + self.convs[1](F.silu(self.norms[1](h)))
            return F.interpolate(result, scale_factor=2.0, mode="nearest")

    model, inputs = Residual(16).eval(), (noise(2, 16, 9, 9), noise(2, 12))
    gm = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        torch.testing.assert_close(gm(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)
    assert len(gm.regions()) == 1
    assert kinds(zendnn_cffi.explain(gm)).count("group_norm") == 2
