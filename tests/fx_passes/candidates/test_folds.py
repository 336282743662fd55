"""Folded weights that only convolutions read are computed when they are packed, and have the same bits then."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import fx, nn

from fx_passes import ops
from fx_passes.candidates.folds import bound, is_late
from fx_passes.candidates.specs import Constants, RegionValues, TensorSpec

PARAMETERS = {
    "weight": torch.randn(4, 3, 3, 3),
    "var": torch.rand(4) + 0.5,
    "gamma": torch.randn(4),
    "bias": torch.randn(4),
}


def region(*, twice: bool = False, outside: bool = False, name: str = "weight") -> tuple[fx.Graph, fx.Node]:
    """conv(x, fold(weight)), which another convolution, or the output, may read, too."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    weight, var, gamma, bias = (graph.get_attr(key) for key in (name, "var", "gamma", "bias"))
    folded = graph.call_function(ops.fold_bn_weight, (weight, var, gamma, 1e-5))
    steps = {"stride": (1, 1), "padding_l": (1, 1), "padding_r": (1, 1), "dilation": (1, 1), "groups": 1}
    found: Any = graph.call_function(ops.convolution, (x, folded, bias), {**steps, "post_ops": ()})
    if twice:
        found = found, graph.call_function(ops.convolution, (x, folded, bias), {**steps, "post_ops": ()})
    graph.output((found, folded) if outside else found)
    return graph, folded


def values_of(graph: fx.Graph, **parameters: torch.Tensor) -> RegionValues:
    return RegionValues(graph, [TensorSpec((1, 3, 5, 5), torch.float32, (75, 25, 5, 1))], PARAMETERS | parameters)


@pytest.mark.parametrize(("outside", "late"), ((False, True), (True, False)))
@pytest.mark.parametrize("twice", (False, True))
def test_what_else_is_read_is_computed_at_once(twice: bool, outside: bool, late: bool) -> None:
    graph, folded = region(twice=twice, outside=outside)
    assert is_late(folded) == late
    assert all(not is_late(node) for node in graph.nodes if node is not folded)


def test_a_fold_that_is_also_the_bias_or_a_post_op_is_not_late() -> None:
    graph, folded = region()
    conv = next(iter(folded.users))
    conv.kwargs = {**conv.kwargs, "post_ops": (("binary", "add", folded),)}
    assert not is_late(folded)
    conv.kwargs, conv.args = {**conv.kwargs, "post_ops": ()}, (conv.args[0], folded, folded)
    assert not is_late(folded)
    folded.target, conv.args = ops.fold_bn_deconv_weight, (conv.args[0], folded, None)
    assert not is_late(folded)


def test_shapes_stand_for_it_until_it_is_computed_and_nothing_is_kept() -> None:
    graph, folded = region()
    values = values_of(graph)
    conv = next(iter(folded.users))
    weight = values.arguments(conv)["weight"]
    assert weight.is_meta and weight.shape == (4, 3, 3, 3) and weight.dtype == torch.float32
    late = values.late(folded)
    assert late is not None
    expected = ops.fold_bn_weight(*(PARAMETERS[name] for name in ("weight", "var", "gamma")), 1e-5)
    assert torch.equal(late(), expected) and late() is not late()
    assert values.constants[folded] is late(), "one that was asked for by others is there"


def test_noise_in_place_of_it_is_what_lowering_sees() -> None:
    graph, folded = region()
    noise = torch.randn(4, 3, 3, 3)
    noisy = values_of(graph).with_constants({folded: noise})
    assert noisy.arguments(next(iter(folded.users)))["weight"] is noise
    assert noisy.late(folded) is None


@pytest.mark.parametrize(
    ("weight", "finite"),
    (
        (PARAMETERS["weight"], True),
        (PARAMETERS["weight"].clone().index_fill_(0, torch.tensor([1]), math.nan), False),
        (PARAMETERS["weight"].clone().index_fill_(0, torch.tensor([1]), math.inf), False),
        (torch.full((4, 3, 3, 3), 3e38), False),  # its product with a factor above 1 is infinite
        (torch.full((4, 3, 3, 3), 3e38) * torch.tensor([1.0, 0, 0, 0]).view(4, 1, 1, 1), True),  # with one below is not
    ),
)
def test_whether_it_is_finite(weight: torch.Tensor, finite: bool) -> None:
    graph, folded = region()
    gamma = torch.tensor([0.5, 1.0, 4.0, -4.0])
    values = values_of(graph, weight=weight, gamma=gamma, var=torch.ones(4))
    assert values.are_constants_finite(next(iter(folded.users))) == finite
    assert bool(values.constants[folded].isfinite().all()) == finite


def test_the_bound_holds() -> None:
    graph, folded = region()
    constants = Constants(graph, PARAMETERS)
    largest = float(constants[folded].abs().max())
    weight, *others = (constants.compute(a) if isinstance(a, fx.Node) else a for a in folded.args)
    assert largest <= 1.0001 * bound(folded, weight, tuple(others))
    assert math.isnan(bound(folded, torch.full((4, 3, 3, 3), math.nan), tuple(others)))


@pytest.mark.parametrize("groups", (1, 2))
@pytest.mark.parametrize("tune", ("off", "auto"))
def test_networks_compute_the_same_and_odd_weights_as_eager(tune: str, groups: int) -> None:
    import zendnn_cffi

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(6, 18, 3, groups=groups, bias=False),
        nn.BatchNorm2d(18),
        nn.ReLU(),
        nn.Conv2d(18, 5, 1),
        nn.BatchNorm2d(5),
    ).eval()
    x = torch.randn(2, 6, 9, 11)
    with torch.no_grad():
        fast = zendnn_cffi.optimize(model, (x,), tune=tune)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        model[0].weight[3] = math.inf
        fast.invalidate()
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5, equal_nan=True)
        model[0].weight[3] = 0.25
        fast.invalidate()
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
