"""Products with a constant matrix are linear layers to quantize()."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import zendnn_cffi
from tests.support.lowering import net, noise
from zendnn_cffi.api.quantization.constants import fold_constants
from zendnn_cffi.api.quantization.products import name_products
from zendnn_cffi.api.quantization_report import sqnr_db

aten = torch.ops.aten


class Products(nn.Module):
    """fn(module, x) with matrices, vectors and tables of its own."""

    def __init__(self, fn: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fn = fn
        self.w, self.b = nn.Parameter(noise(16, 12) / 4), nn.Parameter(noise(12, seed=1))
        self.transposed = nn.Parameter(noise(12, 16, seed=2) / 4)
        self.register_buffer("table", noise(16, 12, seed=3) / 4)
        self.many = nn.Parameter(noise(2, 16, 12, seed=4) / 4)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self, x)


class Conv1D(nn.Module):
    """As Transformers has it, for GPT-2."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(noise(inputs, outputs) / inputs**0.5), nn.Parameter(noise(outputs))

    def forward(self, x: Tensor) -> Tensor:
        sizes = *x.size()[:-1], self.bias.numel()
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(sizes)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), Conv1D(32, 16), Conv1D(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return found


LAYERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "matmul": lambda m, x: x @ m.w,
    "by name": lambda m, x: torch.matmul(x, other=m.w),
    "and a sum": lambda m, x: torch.matmul(x, m.w) + m.b,
    "mm": lambda m, x: torch.mm(x[0], m.w),
    "addmm": lambda m, x: torch.addmm(m.b, x[0], m.w),
    "addmm, factors of 1": lambda m, x: torch.addmm(m.b, x[0], m.w, beta=1, alpha=1.0),
    "addmm and relu": lambda m, x: torch.addmm(m.b, x[0], m.w).relu(),
    "of a buffer": lambda m, x: x @ m.table,
    "transposed": lambda m, x: x @ m.transposed.t(),
    "a matrix that is computed once": lambda m, x: x @ (m.w * m.table.abs()).tanh(),
    "a row of matrices": lambda m, x: x @ m.many[1],
    "a vector": lambda m, x: x[0, 0] @ m.w,
    "four dimensions": lambda m, x: x[:, None] @ m.w,
    "columns": lambda m, x: (x.mT.contiguous().mT @ m.w).view(-1, 12),
    "a matrix that somebody else reads": lambda m, x: x @ m.w + m.w.sum(0),
    "what is written to later": lambda m, x: (x @ m.w).mul_(2).add_(m.b),
}


def exported(fn: Callable[[Any, Tensor], Tensor]) -> Any:
    return torch.export.export(Products(fn), (noise(3, 5, 16),), strict=True).module()


def linear_layers(graph: fx.GraphModule) -> list[fx.Node]:
    return list(graph.graph.find_nodes(op="call_function", target=aten.linear.default))


@pytest.mark.parametrize("case", LAYERS)
@torch.no_grad()
def test_they_compute_the_same_as_linear_layers(case: str) -> None:
    x, graph = noise(3, 5, 16), exported(LAYERS[case])
    name_products(graph)
    fold_constants(graph)
    (layer,) = linear_layers(graph)
    assert isinstance(layer.args[1], fx.Node) and layer.args[1].op == "get_attr"
    assert layer.meta["val"].shape == layer.target(*(arg.meta["val"] for arg in layer.args)).shape
    expected, found = Products(LAYERS[case])(x), graph(x)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("case", LAYERS)
def test_they_are_quantized(case: str, dynamic: bool) -> None:
    """Torchao's quantizer left them float, and nothing said so."""
    x, model = noise(3, 5, 16), Products(LAYERS[case])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    module, report, converted = zendnn_cffi.quantize(model, [x], dynamic=dynamic, tune="off", compare=False)
    (layer,) = linear_layers(converted)
    assert all("dequantize" in str(getattr(arg, "target", "")) for arg in layer.args[:2])
    (row,) = report.layers
    assert (row.kind, row.name) == ("linear", layer.name)
    if not dynamic and case != "a vector":  # scales of the call are for CPUs with VNNI, as rows are for layers
        assert row.computes_in == "int8"
    with torch.no_grad():
        assert sqnr_db(model(x), module(x)) > 30 and sqnr_db(converted(x), module(x)) > 60
        other = noise(4, 7, 16, seed=5)
        assert sqnr_db(model(other), module(other)) > 20
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


STAY: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a matrix that each call computes": lambda m, x: x @ (m.w * x.mean()),
    "a factor of the product": lambda m, x: torch.addmm(m.b, x[0], m.w, alpha=2),
    "a factor of the sum": lambda m, x: torch.addmm(m.b, x[0], m.w, beta=0.5),
    "a sum with a matrix": lambda m, x: torch.addmm(m.table[:5, :12], x[0], m.w),
    "a sum with one number": lambda m, x: torch.addmm(m.b[:1], x[0], m.w),
    "many matrices": lambda m, x: x[:2] @ m.many,
    "one of many": lambda m, x: x @ m.many[:1],
    "vectors": lambda m, x: x @ m.w[:, 0],
    "a matrix before the value": lambda m, x: m.transposed @ x.mT,
    "two constants": lambda m, x: x.sum() + m.transposed @ m.w,
    "in float64": lambda m, x: x.double() @ m.w.double(),
    "in integers": lambda m, x: (8 * x).long() @ (8 * m.w).long(),
    "two values": lambda m, x: x @ x.mT,
}


@pytest.mark.parametrize("case", STAY)
def test_others_stay(case: str) -> None:
    x, graph = noise(3, 5, 16), exported(STAY[case])
    code = graph.code
    name_products(graph)
    assert graph.code == code
    module, report, _ = zendnn_cffi.quantize(Products(STAY[case]), [x], tune="off", compare=False)
    assert not [row for row in report.layers if row.computes_in == "int8"]
    with torch.no_grad():
        torch.testing.assert_close(module(x), Products(STAY[case])(x))


def test_a_matrix_that_is_written_to_stays() -> None:
    def writes(m: Any, x: Tensor) -> Tensor:
        m.table.add_(1)
        found: Tensor = x @ m.table
        return found

    graph = exported(writes)
    name_products(graph)
    assert not linear_layers(graph)


def of_rows(m: Any, x: Tensor) -> Tensor:
    return torch.addmm(m.b, x.reshape(-1, 16), m.w).view(3, 5, 12)


def written_between(m: Any, x: Tensor) -> Tensor:
    x = x * 2
    rows = x.mT.contiguous().mT.reshape(-1, 16)  # a copy
    x.add_(1)
    return torch.addmm(m.b, rows, m.w).view(3, 5, 12) + x.mean()


VIEWS: dict[str, tuple[bool, Callable[[Any, Tensor], Tensor]]] = {
    "rows of three dimensions": (True, of_rows),
    "flattened, and back": (True, lambda m, x: torch.mm(x.flatten(0, 1), m.w).unflatten(0, (3, 5))),
    "rows that others read": (True, lambda m, x: of_rows(m, x) + x.reshape(-1, 16).mean()),
    "a result that others read": (
        False,
        lambda m, x: (lambda y: y.view(3, 5, 12) + y.mean(0))(torch.mm(x.view(-1, 16), m.w)),
    ),
    "other sizes": (False, lambda m, x: torch.mm(x.view(-1, 16), m.w).view(5, 3, 12)),
    "other columns": (False, lambda m, x: torch.mm(x.view(-1, 16), m.w).view(3, 5, 3, 4)),
    "rows of other numbers": (False, lambda m, x: torch.mm(x.reshape(3, 5, 2, 8).view(-1, 16), m.w).view(3, 5, 12)),
    "a value that is written to": (False, written_between),
}


@pytest.mark.parametrize("case", VIEWS)
@torch.no_grad()
def test_views_around_them_go_where_sizes_come_back(case: str) -> None:
    goes, fn = VIEWS[case]
    x, graph = noise(3, 5, 16), exported(fn)
    name_products(graph)
    (layer,) = linear_layers(graph)
    assert (layer.args[0].meta["val"].ndim == 3) == goes and layer.meta["val"].ndim == 2 + goes
    torch.testing.assert_close(graph(x), Products(fn)(x))


def of_linear_layers(model: nn.Module) -> nn.Module:
    """The same with nn.Linear in place of each Conv1D."""
    twin = copy.deepcopy(model)
    for path, layer in list(twin.named_modules()):
        if isinstance(layer, Conv1D):
            linear = nn.Linear(*layer.weight.shape)
            linear.weight, linear.bias = nn.Parameter(layer.weight.t().contiguous()), layer.bias
            twin.set_submodule(path, linear)
    return twin


@pytest.mark.parametrize("given, smooth", (("model", False), ("model", True), ("decomposed", False)))
def test_layers_of_gpt2_are_as_near_as_linear_ones(given: str, smooth: bool) -> None:
    """Their sizes are free: (batch * tokens) rows become (batch, tokens). Decompositions spell nn.Linear so, too."""
    torch.manual_seed(0)
    x, model = noise(2, 9, 16), nn.Sequential(Block(), Block(), nn.Linear(16, 8)).eval()
    with torch.no_grad():
        model[0].norm.weight[3] = 20.0  # which smoothing is for
    program = torch.export.export(model, (x,), strict=True).run_decompositions()
    source: Any = model if given == "model" else program
    options: dict[str, Any] = {"smooth": smooth, "tune": "off", "compare": False}
    module, report, converted = zendnn_cffi.quantize(source, [x], **options)
    assert [row.module for row in report.layers] == ["0.up", "0.down", "1.up", "1.down", "2"]
    assert {row.computes_in for row in report.layers} == {"int8"} and {row.kind for row in report.layers} == {"linear"}
    twin = zendnn_cffi.quantize(of_linear_layers(model), [x], **options)
    assert twin.report.sqnr_db > (22 if smooth else 16)
    for batch in (2, 5) if given == "model" else (2,):
        y = noise(batch, 9, 16, seed=batch)
        with torch.no_grad():
            assert sqnr_db(converted(y), module(y)) > 50 and sqnr_db(twin.converted(y), module(y)) > 50


def test_products_of_as_many_rows_as_numbers_say() -> None:
    """Torchao asked whether the rows that are kept are as many as those of the other operand."""

    def kept(m: Any, x: Tensor) -> Tensor:
        y = m[0](x)
        y = y[y.sum(1) > 0] * y[:1]
        return torch.cat((m[1](x), m[1](y)))

    model, x = net(kept, nn.Linear(8, 8), nn.Linear(8, 8)), noise(16, 8)
    found = zendnn_cffi.quantize(model, [x], tune="off", compare=False)
    assert sum(row.computes_in == "int8" for row in found.report.layers) >= 1
    assert sqnr_db(model(x), found.module(x)) > 20
