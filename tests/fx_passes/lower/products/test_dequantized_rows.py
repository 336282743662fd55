"""Rows that are rounded to integers where no product of integers reads them: primitives round, products are float."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, MappingType, PerAxis, PerGroup, quantize_

import zendnn_cffi
from fx_passes import ops
from tests.fx_passes.lower.products.test_dynamic import optimized
from tests.fx_passes.lower.products.test_dynamic_rows import FORMS, K, by_token
from tests.fx_passes.spellings.test_int8_linear import noise_db
from tests.fx_passes.spellings.test_int8_linear import optimized as by_entry
from tests.support.int8_tensors import Block
from tests.support.lowering import check_regions, noise
from tests.support.quantized import Integers, Weight, ran

F32, BF16 = torch.float32, torch.bfloat16
CONFIGS: dict[str, dict[str, Any]] = {
    "groups": {"weight_dtype": torch.int4, "weight_granularity": PerGroup(16)},
    "groups, 8 bits": {"weight_dtype": torch.int8, "weight_granularity": PerGroup(8)},
    "zero points": {
        "weight_dtype": torch.int4,
        "weight_granularity": PerAxis(0),
        "weight_mapping_type": MappingType.ASYMMETRIC,
    },
}
PRODUCTS = ("inner_product", "matmul")


def layers(config: str, dtype: torch.dtype = F32) -> Any:
    torch.manual_seed(0)
    model = Block().eval().to(dtype)
    quantize_(model, Int8DynamicActivationIntxWeightConfig(**CONFIGS[config]))
    return model


def float_products(fast: Any, dtype: torch.dtype) -> list[str]:
    return [kind for kind, source, name in ran(fast) if kind in PRODUCTS and source == dtype and name != "torch"]


def exported(model: nn.Module, x: Tensor) -> Any:
    free = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    return zendnn_cffi.optimize(torch.export.export(model, (x,), dynamic_shapes=free), tune="off")


@pytest.mark.parametrize("entry", ["optimize", "torch.compile", "torch.export"])
@pytest.mark.parametrize("config", CONFIGS)
def test_layers(config: str, entry: str) -> None:
    model, x = layers(config), noise(3, 5, 64)
    with torch.no_grad():
        fast, behind = (exported(model, x),) * 2 if entry == "torch.export" else by_entry(model, entry, x)
        for source in (x, 5 * x, -x.abs() - 1, x[:2], x.transpose(0, 1)):
            assert noise_db(fast(source), model(source)) > 45
    calls = ran(behind)
    assert len(float_products(behind, F32)) >= 2 and len(calls) > 10
    assert not [call for call in calls if call[2] == "torch"]
    check_regions(behind)


@pytest.mark.parametrize("shape", [(1, 64), (1, 1, 64), (40, 64), (2, 3, 5, 64)])
def test_shapes(shape: tuple[int, ...]) -> None:
    model, x = layers("groups"), noise(*shape)
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        assert noise_db(fast(x), model(x)) > 45
    assert len(float_products(fast, F32)) == 2


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
@pytest.mark.parametrize("config", CONFIGS)
def test_bf16(config: str, entry: str) -> None:
    """PyTorch rounds as torchao does, so that integers are the same; a product adds in another order."""
    model, x = layers(config, BF16), noise(3, 5, 64, dtype=BF16)
    with torch.no_grad():
        fast, behind = by_entry(model, entry, x)
        for source in (x, 5 * x, -x.abs() - 1, x[:1], x.transpose(0, 1)):
            assert noise_db(fast(source), model(source)) > 38 and fast(source).dtype == BF16
    assert len(float_products(behind, BF16)) >= 2
    assert "Intx" not in str(zendnn_cffi.explain(behind))


def test_rows_in_bf16_are_rounded_as_torchao_does() -> None:
    layer = nn.Linear(64, 64, bias=False).to(BF16)
    layer.weight.data.copy_(torch.eye(64))
    quantize_(layer, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8, weight_granularity=PerGroup(64)))
    weight: Any = layer.weight
    weight.qdata.copy_(torch.eye(64))
    weight.scale.fill_(1.0)
    x = noise(50, 64, dtype=BF16) * torch.linspace(0.1, 30, 50, dtype=BF16)[:, None]
    with torch.no_grad():
        assert torch.equal(ops.rounded_rows(x, "asymmetric", -128, 127, torch.finfo(F32).tiny), layer(x))


OTHERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "attention": lambda y, w: F.scaled_dot_product_attention(y[None], y[None], y[None])[0],
    "a float layer": lambda y, w: F.linear(y, w[0]() * 1.5),
    "the caller": lambda y, w: torch.cat((F.linear(y, w[0](), w[0].bias), y), 1),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reader", OTHERS)
def test_rows_that_something_else_reads(reader: str, form: str) -> None:
    model, x = Integers(lambda w, x: OTHERS[reader](FORMS[form](x), w), Weight(17, K)), noise(13, K)
    for traced in (model, torch.export.export(model, (x,)).module()):
        fast = optimized(traced, x, least_db=45)
    assert "dequantize" in [kind for kind, _, _ in ran(fast)]  # exported programs say how long a row is


def test_at_most_a_step_from_eager() -> None:
    model, x = Integers(lambda w, x: by_token(x).tanh() @ w[0]().T, Weight(K, K, bias=False)), noise(99, K)
    model.weights[0].integers.copy_(torch.eye(K))
    model.weights[0].scales.fill_(1.0)
    fast = zendnn_cffi.optimize(torch.export.export(model, (x,)), tune="off")
    with torch.no_grad():
        apart = (fast(x) - model(x)).abs() / (x.abs().amax(1) / 127)[:, None]
    assert apart.max() <= 1.01 and (apart > 0.5).double().mean() < 0.005


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite(number: float) -> None:
    model, x = layers("groups"), noise(5, 64)
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    x[2, 3] = number
    with torch.no_grad():
        ours, theirs = fast(x), model(x)
    assert torch.equal(ours.isnan(), theirs.isnan()) and theirs[2].isnan().all()
    assert noise_db(ours[[0, 1, 3, 4]], theirs[[0, 1, 3, 4]]) > 45
