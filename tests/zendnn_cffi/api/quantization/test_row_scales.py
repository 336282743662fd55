"""quantize(dynamic=True): a scale for each row, zero points where values lie on one side of zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from tests.support.lowering import noise
from tests.support.mixed_precision import calls_of_noise, prepared
from tests.support.quantized import ran
from zendnn_cffi.api.quantization.layers import observer_of
from zendnn_cffi.api.quantization.pt2e import torchao
from zendnn_cffi.api.quantization.row_scales import is_one_sided
from zendnn_cffi.api.quantization_report import sqnr_db

OPERATORS = torch.ops.quantized_decomposed


def called_operators(converted: torch.fx.GraphModule) -> list[str]:
    """Those that choose scales."""
    return [str(n.target).partition(".")[2] for n in converted.graph.nodes if "choose_qparams" in str(n.target)]


def integer_products(fast: torch.fx.GraphModule) -> int:
    """How many products are of integers."""
    return sum(kind in ("inner_product", "matmul") and dtype == torch.int8 for kind, dtype, _ in ran(fast))


def model_of(between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), between, nn.Linear(48, 8)).eval()


@pytest.mark.needs("vnni")
def test_rows_of_different_size_are_all_near() -> None:
    """With one scale for all, the integers of the smallest row would be zeros."""
    x = noise(2, 6, 32) * torch.logspace(-3, 1, 6).reshape(6, 1)
    model = nn.Linear(32, 8, bias=False).eval()
    options = {"correct_bias": False, "tune": "off", "compare": False}  # a mean over rows is that of the largest
    fast, report, _ = zendnn_cffi.quantize(model, [x], dynamic=True, **options)
    assert [layer.computes_in for layer in report.layers] == ["int8"]
    with torch.no_grad():
        assert all(sqnr_db(model(x)[:, row], fast(x)[:, row]) > 30 for row in range(6))


@pytest.mark.needs("vnni")
@pytest.mark.parametrize(
    "between, chosen",
    [
        (nn.Tanh(), "choose_qparams_per_token.default"),
        (nn.GELU(), "choose_qparams_per_token_asymmetric.default"),
        (nn.ReLU(), "choose_qparams_per_token_asymmetric.default"),
        (nn.SiLU(), "choose_qparams_per_token_asymmetric.default"),
    ],
)
@pytest.mark.parametrize("shape", [(5, 32), (2, 5, 32)], ids=str)
def test_zero_points_where_values_lie_on_one_side(between: nn.Module, chosen: str, shape: tuple[int, ...]) -> None:
    x = noise(*shape)
    fast, report, converted = zendnn_cffi.quantize(
        model_of(between), [x], dynamic=True, correct_bias=False, tune="off", compare=False
    )
    assert called_operators(converted) == ["choose_qparams_per_token.default", chosen]
    assert integer_products(fast) == 2
    with torch.no_grad():
        assert sqnr_db(converted(x), fast(x)) > 40 and report.sqnr_db > 30


def test_a_vector_keeps_one_scale() -> None:
    x = noise(32)
    fast, _, converted = zendnn_cffi.quantize(model_of(nn.Tanh()), [x], dynamic=True, tune="off", compare=False)
    assert called_operators(converted) == ["choose_qparams.tensor"] * 2
    with torch.no_grad():
        assert sqnr_db(converted(x), fast(x)) > 30


def test_values_that_two_layers_read_are_quantized_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 24), nn.Linear(16, 24)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.a(x)) * self.b(x)

    x = noise(7, 16)
    fast, _, _ = zendnn_cffi.quantize(Shared().eval(), [x], dynamic=True, tune="off", compare=False)
    assert [kind for kind, _, _ in ran(fast)].count("choose_scale") <= 6


@pytest.mark.parametrize(
    "values, expected",
    [
        (lambda x: x, False),
        (lambda x: x.abs(), True),
        (lambda x: -x.abs(), True),
        (lambda x: x.clamp(-0.4, 1.0), True),
        (lambda x: x.clamp(-0.6, 1.0), False),
        (lambda x: x * 0, True),
    ],
)
def test_which_values_lie_on_one_side(values: Callable[[Tensor], Tensor], expected: bool) -> None:
    calls = [((values(args[0]),), kwargs) for args, kwargs in calls_of_noise(2, 40, 32)]
    graph = prepared(nn.Sequential(nn.Linear(32, 8)).eval(), calls, dynamic=True)
    found = [observer_of(graph, node) for node in graph.graph.nodes if observer_of(graph, node) is not None]
    assert [is_one_sided(o) for o in found if getattr(o, "is_dynamic", False)] == [expected]
    assert len(called_operators(torchao().convert(graph))) == 1


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("between", [nn.Tanh(), nn.GELU()])
def test_the_converted_graph_can_be_saved(between: nn.Module, tmp_path: str) -> None:
    x = noise(5, 32)
    fast, _, converted = zendnn_cffi.quantize(model_of(between), [x], dynamic=True, tune="off", compare=False)
    torch.export.save(torch.export.export(converted, (x,)), f"{tmp_path}/m.pt2")
    again = zendnn_cffi.optimize(f"{tmp_path}/m.pt2", tune="off")
    with torch.no_grad():
        assert sqnr_db(fast(x), again(x)) > 40
    assert integer_products(again) == 2
