"""Batch normalizations are folded where that computes the same, and stay right where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import zendnn_cffi
from tests.support.lowering import net, noise
from zendnn_cffi.api.quantization import pt2e
from zendnn_cffi.api.quantization.norms import fold_norms, hidden_norms, show_norms
from zendnn_cffi.api.quantization_report import sqnr_db

aten = torch.ops.aten


def norm(channels: int, kind: Callable[..., nn.Module] = nn.BatchNorm2d, **options: Any) -> nn.Module:
    """With statistics and factors that are not those of a new one."""
    made = kind(channels, **options)
    state = made.state_dict()
    for name, value in state.items():
        if value.is_floating_point():
            value.copy_(noise(channels, seed=len(name)).abs() + 0.5 if name != "bias" else noise(channels))
    return made


def graph_of(model: nn.Module, x: Tensor) -> fx.GraphModule:
    return torch.export.export(model, (x,), strict=True).module()


FOLDED: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "conv1d": (lambda: [nn.Conv1d(6, 4, 3), norm(4, nn.BatchNorm1d)], (2, 6, 9)),
    "conv2d": (lambda: [nn.Conv2d(6, 4, 3), norm(4)], (2, 6, 5, 7)),
    "grouped, no bias": (lambda: [nn.Conv2d(6, 4, 3, groups=2, bias=False), norm(4)], (2, 6, 5, 7)),
    "conv3d": (lambda: [nn.Conv3d(6, 4, 2), norm(4, nn.BatchNorm3d)], (2, 6, 3, 4, 5)),
    "transposed": (lambda: [nn.ConvTranspose2d(6, 4, 3), norm(4)], (2, 6, 5, 7)),
    "transposed, grouped": (lambda: [nn.ConvTranspose2d(6, 9, 3, groups=3), norm(9)], (2, 6, 5, 7)),
    "linear": (lambda: [nn.Linear(6, 4), norm(4, nn.BatchNorm1d)], (3, 6)),
    "not affine": (lambda: [nn.Conv2d(6, 4, 3), norm(4, affine=False)], (2, 6, 5, 7)),
    "two": (lambda: [nn.Conv2d(6, 4, 3), norm(4), norm(4, affine=False)], (2, 6, 5, 7)),
    "padding by name": (lambda: [nn.Conv2d(6, 4, 3, padding="same"), norm(4)], (2, 6, 5, 7)),
}


@pytest.mark.parametrize("case", FOLDED)
@torch.no_grad()
def test_it_computes_the_same_without_them(case: str) -> None:
    torch.manual_seed(0)
    layers, shape = FOLDED[case]
    model, x = nn.Sequential(*layers()).eval(), noise(*shape)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    graph = graph_of(model, x)
    assert len(fold_norms(graph)) == len(model) - 1
    assert not graph.graph.find_nodes(op="call_function", target=aten.batch_norm.default)
    torch.testing.assert_close(graph(x), model(x))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not fold_norms(graph)


def plus(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m[0](x)
    return m[1](y) + y


STAY: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], list[nn.Module]]]] = {
    "somebody else reads the layer": (plus, lambda: [nn.Conv2d(6, 8, 3), norm(8)]),
    "two read it": (
        lambda m, x: (lambda y: m[1](y) + m[2](y))(m[0](x)),
        lambda: [nn.Conv2d(6, 8, 3), norm(8), norm(8)],
    ),
    "statistics of the batch": (
        lambda m, x: F.batch_norm(m[0](x), None, None, training=True),
        lambda: [nn.Conv2d(6, 8, 3)],
    ),
    "computed statistics": (
        lambda m, x: F.batch_norm(m[0](x), x.mean((0, 2, 3))[[0] * 8], x.abs().mean((0, 2, 3))[[0] * 8]),
        lambda: [nn.Conv2d(6, 8, 3)],
    ),
    "a linear layer of sequences": (
        lambda m, x: m[1](m[0](x.flatten(2)).transpose(1, 2).contiguous().transpose(1, 2)),
        lambda: [nn.Linear(99, 8), norm(6, nn.BatchNorm1d)],
    ),
    "channels of a sequence": (
        lambda m, x: m[1](m[0](x.flatten(2))),
        lambda: [nn.Linear(99, 6), norm(6, nn.BatchNorm1d)],
    ),
    **{
        f"a sample alone, {number}": (fn, layers)
        for number, (fn, layers) in enumerate(
            (
                (lambda m, x: m[1](m[0](x[0].flatten(1))), lambda: [nn.Conv1d(6, 97, 3), norm(97, nn.BatchNorm1d)]),
                (
                    lambda m, x: F.batch_norm(m[0](x[0]), m[1].running_mean, m[1].running_var, m[1].weight, m[1].bias),
                    lambda: [nn.Conv2d(6, 7, 3), norm(7)],
                ),
                (
                    lambda m, x: m[1](m[0](x[0].flatten(1))),
                    lambda: [nn.ConvTranspose1d(6, 101, 3), norm(101, nn.BatchNorm1d)],
                ),
            )
        )
    },
    "a relu lies between": (lambda m, x: m[1](F.relu(m[0](x))), lambda: [nn.Conv2d(6, 8, 3), norm(8)]),
    "before the layer": (lambda m, x: m[1](m[0](x)), lambda: [norm(6), nn.Conv2d(6, 8, 3)]),
}


@pytest.mark.parametrize("case", STAY)
def test_the_others_stay_and_are_right(case: str) -> None:
    """torchao folded some all the same: 5 dB in place of 43 where a sum reads the convolution, too."""
    torch.manual_seed(0)
    fn, layers = STAY[case]
    model, x = net(fn, *layers()), noise(3, 6, 9, 11)
    assert not fold_norms(graph_of(model, x))
    module, _, converted = zendnn_cffi.quantize(model, [x], tune="off", compare=False)
    with torch.no_grad():
        assert sqnr_db(model(x), module(x)) > 30
    assert converted.graph.find_nodes(op="call_function", target=aten.batch_norm.default)


SHARED: dict[str, Callable[[], nn.Module]] = {
    "one layer": lambda: net(
        lambda m, x: m[2](m[0](F.relu(m[1](m[0](x))))), nn.Conv2d(6, 6, 3, padding=1), norm(6), norm(6, eps=1.0)
    ),
    "one parameter": lambda: _tied(
        net(
            lambda m, x: m[3](m[2](F.relu(m[1](m[0](x))))),
            *(nn.Conv2d(6, 6, 3, padding=1), norm(6), nn.Conv2d(6, 6, 3, padding=1), norm(6, eps=1.0)),
        )
    ),
}


def _tied(model: Any) -> nn.Module:
    first, second = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    second.weight = first.weight
    return model


@pytest.mark.parametrize("case", SHARED)
def test_layers_with_the_same_weights_have_their_own_normalizations(case: str) -> None:
    """torchao multiplied the shared weights by one factor, and left the other out: -3 dB in place of 40."""
    torch.manual_seed(0)
    model, x = SHARED[case]().eval(), noise(3, 6, 9, 11)
    module, report, _ = zendnn_cffi.quantize(model, [x], tune="off", compare=False)
    with torch.no_grad():
        assert sqnr_db(model(x), module(x)) > 30
    assert [layer.computes_in for layer in report.layers] == ["int8"] * 2


def test_hidden_ones_compute_and_come_back() -> None:
    model, x = nn.Sequential(norm(6)).eval(), noise(3, 6, 9, 11)
    graph = graph_of(model, x)
    with hidden_norms(graph):
        assert not graph.graph.find_nodes(op="call_function", target=aten.batch_norm.default)
        torch.testing.assert_close(graph(x), model(x))
    assert len(graph.graph.find_nodes(op="call_function", target=aten.batch_norm.default)) == 1
    show_norms(graph)
    torch.testing.assert_close(graph(x), model(x))


def test_normalizations_that_stay_export_no_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    """convert_pt2e exported 96 patterns of training where it saw one: 20 s for a network of two layers."""
    model, x = nn.Sequential(norm(6), nn.Conv2d(6, 8, 3), nn.ReLU(), norm(8)).eval(), noise(3, 6, 9, 11)
    quantizer = pt2e.torchao()
    prepared = quantizer.prepare(pt2e.exported_graph(model, ((x,), {})), False)
    with torch.no_grad():
        pt2e.calibrate(prepared, [((x,), {})])

    def export(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it exports patterns")

    monkeypatch.setattr(torch.export, "export", export)
    converted = quantizer.convert(prepared)
    assert len(converted.graph.find_nodes(op="call_function", target=aten.batch_norm.default)) == 2
