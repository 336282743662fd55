"""What torchao's PT2E makes of small networks, X86InductorQuantizer's fusions among them.

The oracle is the graph with quantize and dequantize operators in eager. A number midway between two integers may become
either, so a result may differ by what one such step changes.
"""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import zendnn_cffi
from tests.support.lowering import net, noise
from tests.support.quantized import ran
from zendnn_cffi.primitives.attributes import ARG_DST

U8 = torch.uint8
STEPS = 2.5  # a step in one layer may become one in the next
Function = Callable[[Any, Tensor], Any]
Modules = Callable[[], Sequence[nn.Module]]


def by_pt2e(
    model: nn.Module,
    x: Tensor,
    *,
    is_dynamic: bool = False,
    is_qat: bool = False,
    matmuls: bool = False,
    batch: bool = False,
) -> Any:
    """model, quantized for Inductor on x86: observed on four random inputs.

    matmuls  products of two values are quantized, too
    batch    any number of samples
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's, about itself
        from torchao.quantization.pt2e import move_exported_model_to_eval
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        config = x86.get_default_x86_inductor_quantization_config(is_qat=is_qat, is_dynamic=is_dynamic)
        quantizer = x86.X86InductorQuantizer().set_global(config)
        if matmuls:
            quantizer.set_function_type_qconfig(torch.matmul, quantizer.get_global_quantization_config())
        sizes = ({0: torch.export.Dim("n", min=2, max=64)},) if batch else None
        exported = torch.export.export(model.train(is_qat), (x,), strict=True, dynamic_shapes=sizes)
        prepare = prepare_qat_pt2e if is_qat else prepare_pt2e
        prepared = prepare(exported.module(), quantizer)
        if is_qat:
            prepared(x)
            move_exported_model_to_eval(prepared)
        with torch.no_grad():
            for seed in range(4):
                prepared(noise(*x.shape, seed=seed))
        quantized = convert_pt2e(prepared)
        if is_qat:
            move_exported_model_to_eval(quantized)
        model.eval()
        return quantized


def steps_of(quantized: fx.GraphModule) -> list[float]:
    """How much a step in its last layer's source changes each result: the source's scale times the largest weight."""
    results = quantized.graph.output_node().args[0]
    return [_step(quantized, result) for result in (results if isinstance(results, list | tuple) else [results])]


def _step(quantized: fx.GraphModule, node: Any) -> float:
    while not str(node.target).startswith(("aten.conv", "aten.linear")):
        node = node.args[0]
    source, weight = node.args[:2]
    while "dequantize" not in str(source.target):
        source = source.args[0]
    largest = operator.attrgetter(weight.args[1].target)(quantized).max() * 127
    return float(source.args[1]) * float(largest)


def sources(fast: Any) -> list[tuple[str, torch.dtype]]:
    """(kind, dtype of the source) of each call that ran, concatenations left out."""
    names = {"inner_product": "product", "matmul": "product"}
    return [(names.get(kind, kind), source) for kind, source, _ in ran(fast) if kind != "concat"]


def _residual(m: Any, x: Tensor) -> Tensor:
    x = F.relu(m[0](x))
    return F.relu(m[2](F.relu(m[1](x))) + x)


def _inverted(m: Any, x: Tensor) -> Tensor:
    x = F.relu6(m[0](x))
    return m[2](F.relu6(m[1](x))) + m[3](x)


def _classifier(m: Any, x: Tensor) -> Tensor:
    return m[1](F.adaptive_avg_pool2d(F.max_pool2d(F.relu(m[0](x)), 2), 1).flatten(1))


def _joined(m: Any, x: Tensor) -> Tensor:
    x = F.relu(m[0](x))
    return m[2](torch.cat([x, F.relu(m[1](x))], 1))


def _added(m: Any, x: Tensor) -> Tensor:
    x = F.relu(m[0](x))
    return m[3](m[1](x) + m[2](x))


def _added_with_relu(m: Any, x: Tensor) -> Tensor:
    x = F.relu(m[0](x))
    return m[3](F.relu(m[1](x) + m[2](x)))


def _added_swapped(m: Any, x: Tensor) -> Tensor:
    x = F.relu(m[0](x))
    return m[2](F.relu(x + m[1](x)))


def _pooled_twice(m: Any, x: Tensor) -> Tensor:
    x = F.max_pool2d(F.relu(m[0](x)), 2)
    return m[2](x + m[1](x))


def _promoted(m: Any, x: Tensor) -> Tensor:
    """One dequantized value with three readers."""
    x = m[0](x)
    return m[1](x) + m[2](x) + x


def _promoted_linear(m: Any, x: Tensor) -> Tensor:
    x = F.relu(m[0](x))
    return m[1](x) + m[2](x)


def _qcat(m: Any, x: Tensor) -> Tensor:
    return m[2](torch.cat([m[0](x), m[1](torch.pow(x, 2))], 1))


def _flattened(m: Any, x: Tensor) -> Tensor:
    return m[1](torch.flatten(F.adaptive_avg_pool2d(F.relu(m[0](x)), 1), 1))


def _residual_linear(m: Any, x: Tensor) -> Tensor:
    x = m[0](x)
    return m[2](m[1](x) + x)


def _activated(function: Callable[[Tensor], Tensor]) -> Function:
    return lambda m, x: m[1](function(m[0](x)))


def _two_convolutions() -> Sequence[nn.Module]:
    return nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 1)


def _three_convolutions() -> Sequence[nn.Module]:
    return nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 8, 1)


def _four_convolutions() -> Sequence[nn.Module]:
    return nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 8, 1)


def _inverted_residual() -> Sequence[nn.Module]:
    return nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.Conv2d(16, 24, 1), nn.Conv2d(16, 24, 1)


def _two_linears() -> Sequence[nn.Module]:
    return nn.Linear(24, 32), nn.Linear(32, 8)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda y: y,
    "_relu": F.relu,
    "_relu6": F.relu6,
    "_hardtanh": F.hardtanh,
    "_hardswish": F.hardswish,
    "_silu": F.silu,
}
C, P, L = "convolution", "pooling", "product"
# name -> function, modules, what runs on integers
IMAGES: dict[str, tuple[Function, Modules, str]] = {
    **{f"qconv2d{name}": (_activated(f), _two_convolutions, f"{C} {C}") for name, f in ACTIVATIONS.items()},
    "qconv2d_add": (_added, _four_convolutions, f"{C} {C} {C} {C}"),
    "qconv2d_add_relu": (_added_with_relu, _four_convolutions, f"{C} {C} {C} {C}"),
    "qconv2d_add swapped": (_added_swapped, _three_convolutions, f"{C} {C} {C}"),
    "residual": (_residual, lambda: (*_two_convolutions(), nn.Conv2d(16, 16, 3, padding=1)), f"{C} {C} {C}"),
    "inverted residual": (_inverted, _inverted_residual, f"{C} {C} {C} {C}"),
    "qmaxpool2d with two users": (_pooled_twice, _three_convolutions, f"{C} {P} {C} {C}"),
    "dequant_promotion": (_promoted, lambda: (*_two_convolutions(), nn.Conv2d(16, 16, 1)), f"{C} {C} {C}"),
    "qcat": (_qcat, lambda: (nn.Conv2d(3, 16, 3), nn.Conv2d(3, 16, 3), nn.Conv2d(32, 8, 1)), f"{C} {C} {C}"),
    "concat": (_joined, lambda: (*_two_convolutions(), nn.Conv2d(32, 8, 1)), f"{C} {C} {C}"),
    "qflatten": (_flattened, lambda: (nn.Conv2d(3, 16, 3), nn.Linear(16, 10)), f"{C} {P} {L}"),
    "classifier": (_classifier, lambda: (nn.Conv2d(3, 16, 3), nn.Linear(16, 10)), f"{C} {P} {P} {L}"),
}
ROWS: dict[str, tuple[Function, Modules, str]] = {
    "qlinear": (_activated(lambda y: y), _two_linears, f"{L} {L}"),
    "qlinear_relu": (_activated(F.relu), _two_linears, f"{L} {L}"),
    "qlinear_gelu": (_activated(F.gelu), _two_linears, f"{L} {L}"),
    "qlinear_gelu, tanh": (_activated(lambda y: F.gelu(y, approximate="tanh")), _two_linears, f"{L} {L}"),
    "qlinear_add": (
        _residual_linear,
        lambda: (nn.Linear(24, 32), nn.Linear(32, 32), nn.Linear(32, 8)),
        f"{L} {L} {L}",
    ),
    "dequant_promotion": (
        _promoted_linear,
        lambda: (nn.Linear(24, 32), nn.Linear(32, 16), nn.Linear(32, 16)),
        f"{L} {L} {L}",
    ),
}
COLUMNS: dict[str, tuple[Function, Modules, str]] = {
    "qlinear of a transposed input": (
        lambda m, x: m[1](F.relu(m[0](x.transpose(1, 2)))),
        _two_linears,
        f"{L} {L}",
    ),
}
GROUPS = {
    "images": (IMAGES, (2, 3, 14, 13)),
    "rows": (ROWS, (5, 24)),
    "rows of three dimensions": (ROWS, (2, 3, 24)),
    "columns": (COLUMNS, (2, 24, 3)),
}


class Cases(nn.Module):
    """All cases of a group on one input: a result each."""

    def __init__(self, cases: dict[str, tuple[Function, Modules, str]]) -> None:
        super().__init__()
        torch.manual_seed(0)  # a midway number is as rare as it is, and the same one each time
        self.functions = [function for function, _, _ in cases.values()]
        self.modules_of = nn.ModuleList(nn.ModuleList(modules()) for _, modules, _ in cases.values())
        self.eval()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(m, x) for function, m in zip(self.functions, self.modules_of, strict=True))


def assert_within_steps(fast: Any, quantized: Any, x: Tensor, names: Sequence[str]) -> None:
    with torch.no_grad():
        ours, graph = fast(x), quantized(x)
    for name, a, b, step in zip(names, ours, graph, steps_of(quantized), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype) and b.unique().numel() > 2, name
        apart = (a - b).abs() / step
        assert apart.max() <= STEPS and (apart > 1e-3).double().mean() < 0.4, name


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("group", GROUPS)
def test_all_of_it_runs_on_integers(group: str) -> None:
    cases, shape = GROUPS[group]
    model, x = Cases(cases), noise(*shape)
    quantized = by_pt2e(model, x)
    fast = zendnn_cffi.optimize(quantized, (x,), tune="off")
    assert_within_steps(fast, quantized, x, list(cases))
    found = Counter(call for call in sources(fast) if call[0] in (C, P, L))
    assert found == Counter((kind, U8) for _, _, kinds in cases.values() for kind in kinds.split())


# Batch normalizations are folded by torchao: the same graphs, for 20 seconds more of its time.
QAT: dict[str, tuple[Function, Modules, str]] = {
    f"qat_{name}": IMAGES[name]
    for name in (*(f"qconv2d{name}" for name in ACTIVATIONS), "qconv2d_add", "qconv2d_add_relu")
}


@pytest.mark.needs("vnni")
@pytest.mark.parametrize(("cases", "shape"), [(QAT, (2, 3, 11, 12)), (ROWS, (5, 24))])
def test_quantization_aware_training(cases: dict[str, tuple[Function, Modules, str]], shape: tuple[int, ...]) -> None:
    model, x = Cases(cases), noise(*shape)
    quantized = by_pt2e(model, x, is_qat=True)
    fast = zendnn_cffi.optimize(quantized, (x,), tune="off")
    assert_within_steps(fast, quantized, x, list(cases))
    found = Counter(call for call in sources(fast) if call[0] in (C, P, L))
    assert found == Counter((kind, U8) for _, _, kinds in cases.values() for kind in kinds.split())


@pytest.mark.needs("vnni")
def test_a_sum_that_broadcasts_is_no_residual_sum() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m[0](x))
        return m[2](m[1](x) + x.mean((2, 3), keepdim=True))

    cases = {"broadcast": (forward, _three_convolutions, f"{C} {C} {C}")}
    model, x = Cases(cases), noise(2, 3, 11, 12)
    quantized = by_pt2e(model, x)
    fast = zendnn_cffi.optimize(quantized, (x,), tune="off")
    assert_within_steps(fast, quantized, x, list(cases))
    assert [call for call in sources(fast) if call[0] == C] == [(C, U8)] * 3
    calls = [call for lowered in fast.zen_region_0.lowered.values() for call in lowered.program.calls if call.kind == C]
    assert "sum" not in [entry[0] for call in calls for entry in call.primitive.pd.attr.post_ops]


@pytest.mark.needs("vnni")
def test_any_number_of_samples() -> None:
    cases = {name: (IMAGES | ROWS)[name] for name in ("qconv2d_add_relu", "qflatten")}
    model, x = Cases(cases), noise(4, 3, 11, 12)
    quantized = by_pt2e(model, x, batch=True)
    sizes = ({0: torch.export.Dim("n", min=2, max=64)},)
    fast = zendnn_cffi.optimize(torch.export.export(quantized, (x,), dynamic_shapes=sizes), tune="off")
    for samples in (4, 3, 7):
        assert_within_steps(fast, quantized, noise(samples, 3, 11, 12), list(cases))
    found = Counter(call for call in sources(fast) if call[0] in (C, P, L))
    assert len(fast.regions()) == 1 and found == Counter({(C, U8): 15, (P, U8): 3, (L, U8): 3})


class Attention(nn.Module):
    """Torchao's q_attention_block, with one head or several."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, 32
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.apart(layer(x)) for layer in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(-2, -1)) / (self.width // self.heads) ** 0.5
        return torch.matmul(scores.softmax(-1), v)

    def apart(self, x: Tensor) -> Tensor:
        if self.heads == 1:
            return x
        return x.view(x.shape[0], x.shape[1], self.heads, -1).permute(0, 2, 1, 3)


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("matmuls", [False, True])
def test_an_attention_block(matmuls: bool, heads: int) -> None:
    torch.manual_seed(0)
    model, x = Attention(heads), noise(2, 7, 32)
    quantized = by_pt2e(model, x, matmuls=matmuls)
    fast = zendnn_cffi.optimize(quantized, (x,), tune="off")
    with torch.no_grad():
        ours, graph = fast(x), quantized(x)
    scales = [node.args[1] for node in quantized.graph.nodes if "quantize_per_tensor" in str(node.target)]
    assert (ours - graph).abs().max() <= max(scales)
    columns = [
        call.args[ARG_DST][1].dims[-1]
        for lowered in fast.zen_region_0.lowered.values()
        for call in lowered.program.calls
        if call.kind in ("inner_product", "matmul") and call.dtype == U8
    ]
    values = model.width // heads if matmuls else 0  # weighted by the softmax, of which integers count from 0
    assert sum(columns) == 3 * model.width + values  # of query, key and value, one product where they are only moved


@pytest.mark.needs("vnni")
def test_dynamic_quantization_is_right() -> None:
    torch.manual_seed(0)
    model, x = net(lambda m, x: m[1](F.relu(m[0](x))), nn.Linear(24, 32), nn.Linear(32, 8)), noise(5, 24)
    quantized = by_pt2e(model, x, is_dynamic=True)
    fast = zendnn_cffi.optimize(quantized, (x,), tune="off")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), quantized(x), atol=1e-2, rtol=0)
    assert [kind for kind, source in sources(fast) if source == U8] == [L, L]
