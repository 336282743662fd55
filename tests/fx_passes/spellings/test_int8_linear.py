"""Layers that torchao's quantize_() made: on integers by each entry, for each configuration, and as near as eager."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
import zendnn_cffi.backend
from fx_passes import ops
from fx_passes.lower.products import scales
from fx_passes.saved.errors import NotSaved
from tests.fx_passes.lower.products.test_dynamic import products
from tests.support.int8_tensors import CONFIGS, DYNAMIC, WEIGHTS_ALONE, Block, block, quantized
from tests.support.lowering import noise
from tests.support.quantized import ran

BF16, F16 = torch.bfloat16, torch.float16
LEAST_DB = {torch.float32: 45.0, BF16: 33.0, F16: 50.0}  # against eager: steps of integers, and eager's own rounding


def optimized(model: nn.Module, entry: str, x: Tensor, **options: Any) -> tuple[Any, Any]:
    """What to call, and the optimized module behind it."""
    if entry == "optimize":
        fast = zendnn_cffi.optimize(model, (x,), **{"tune": "off", **options})
        fast(x)
        return fast, fast
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="zendnn", options={"tune": "off", **options})
    compiled(x)
    return compiled, zendnn_cffi.backend.compiled_modules()[-1]


def noise_db(ours: Tensor, theirs: Tensor) -> float:
    apart = (ours.double() - theirs.double()).pow(2).sum()
    return float(10 * torch.log10(theirs.double().pow(2).sum() / apart.clamp(min=1e-300)))


def check(fast: Any, model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        for source in (x, 5 * x, -x.abs() - 1, x[:1], x.reshape(-1, x.shape[-1])[::2], x.transpose(0, 1)):
            ours, theirs = fast(source), model(source)
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert noise_db(ours, theirs) > LEAST_DB[x.dtype]


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
@pytest.mark.parametrize("config", CONFIGS)
def test_float32(config: str, entry: str, asks: bool) -> None:
    model, x = block(config, asks=asks), noise(3, 5, 64)
    with torch.no_grad():
        fast, behind = optimized(model, entry, x)
    assert len(products(behind)) == (2 if config in DYNAMIC else 0)
    told = str(zendnn_cffi.explain(behind))
    assert "Int8Tensor" not in told and "Float8" not in told
    check(fast, model, x)


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
@pytest.mark.parametrize(
    "config",
    ["rows", "rows, one scale of the weight", "rows, reduced", "outputs", "groups", "groups, 4 bits", "float8"],
)
def test_bf16(config: str, entry: str) -> None:
    model, x = block(config, BF16, asks=True), noise(3, 5, 64, dtype=BF16)
    with torch.no_grad():
        fast, behind = optimized(model, entry, x)
    assert len(products(behind)) == (2 if config in DYNAMIC else 0)
    check(fast, model, x)


@pytest.mark.parametrize("config", ["rows, asymmetric", "whole", "whole, asymmetric"])
def test_bf16_that_no_primitive_computes_as_torchao_does_stays_there(config: str) -> None:
    model, x = block(config, BF16), noise(3, 5, 64, dtype=BF16)
    fast = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
    assert not products(fast)
    assert "Int8Tensor" in str(zendnn_cffi.explain(fast))


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
@pytest.mark.parametrize("config", WEIGHTS_ALONE)
def test_all_is_one_region(config: str, entry: str, asks: bool) -> None:
    """The first layer stood outside where torch.export gave the graph: its features seemed to be free."""
    model, x = block(config, asks=asks), noise(3, 5, 64)
    with torch.no_grad():
        _, behind = optimized(model, entry, x)
    assert len(behind.regions()) == 1
    assert [node.became for node in zendnn_cffi.explain(behind).nodes].count("inner_product") == 2


@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
@pytest.mark.parametrize("config", WEIGHTS_ALONE)
def test_float16_where_inputs_stay_float(config: str, entry: str) -> None:
    """Products of floats in float32; integers times their scales are not rounded between."""
    model, x = block(config, F16, asks=True), noise(3, 5, 64, dtype=F16)
    with torch.no_grad():
        fast, behind = optimized(model, entry, x)
    told = zendnn_cffi.explain(behind)
    assert [node.became for node in told.nodes].count("inner_product") == 2 and "Tensor" not in str(told)
    check(fast, model, x)


@pytest.mark.parametrize("config", ["rows", "whole, asymmetric", "rows, asymmetric, 4 bits"])
def test_float16_inputs_that_become_integers_stay_torchaos(config: str, tmp_path: Path) -> None:
    model, x = block(config, F16), noise(3, 5, 64, dtype=F16)
    fast = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        assert noise_db(fast(x), model(x)) > LEAST_DB[F16]
    assert not products(fast) and "Tensor" in str(zendnn_cffi.explain(fast))
    with pytest.raises(NotSaved, match=r"Tensor of float16\): torchao's quantize_\(\) of a model in float32 makes"):
        zendnn_cffi.save(fast, tmp_path / "module.safetensors")


def test_bf16_is_nearer_to_exact_arithmetic_than_eager() -> None:
    """The integers are eager's; what is made of them is rounded once, and in eager three times."""
    layer = quantized(nn.Linear(512, 256), "rows", BF16)
    x = noise(64, 512, dtype=BF16)
    fast = zendnn_cffi.optimize(layer, (x,), tune="off")
    scale = (x.abs().amax(-1, keepdim=True) / 127.5).float()
    weight: Any = layer.weight
    real = torch.round(x.float() * (1.0 / scale)).clamp(-128, 127).double() * scale.double()
    exact = F.linear(real, weight.qdata.double() * weight.scale.double(), layer.bias.double())
    with torch.no_grad():
        ours, theirs = fast(x).double(), layer(x).double()
    assert (ours - exact).norm() < (theirs - exact).norm()
    assert (ours - exact).abs().max() <= exact.abs().max() * 2**-8


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_step_of_one_row_has_few_primitives(dtype: torch.dtype) -> None:
    """Five or six choose and quantize, and one computes: a step of generated text is little else."""
    layer, x = quantized(nn.Linear(256, 128), "rows", dtype), noise(1, 1, 256, dtype=dtype)
    fast = zendnn_cffi.optimize(layer, (x,), tune="off")
    with torch.no_grad():
        for source in (x, 100 * x, torch.zeros_like(x), x.abs()):
            ours, theirs = fast(source), layer(source)
            assert ours.dtype == dtype and noise_db(ours, theirs) > LEAST_DB[dtype]
    kinds = [kind for kind, _, _ in ran(fast)]
    rounding = dtype != torch.float32
    assert kinds == ["choose_scale"] * (4 + rounding) + ["binary", "inner_product"]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("config", ["rows", "rows, reduced"])
def test_rows_that_pytorch_reduces(config: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = quantized(nn.Linear(256, 128), config, dtype), noise(40, 256, dtype=dtype)
    by_primitives = zendnn_cffi.optimize(layer, (x,), tune="off")(x)
    monkeypatch.setattr(scales, "ways_of", lambda rows: (True,))
    fast = zendnn_cffi.optimize(layer, (x,), tune="off")
    with torch.no_grad():
        assert torch.equal(fast(x), by_primitives)
    assert {name for kind, _, name in ran(fast) if kind == "choose_scale"} > {"torch"}


@pytest.mark.needs("vnni")
def test_bf16_inside_of_float32() -> None:
    model, x = block(), noise(3, 5, 64)
    fast = zendnn_cffi.optimize(model, (x,), dtype=BF16, tune="off")
    with torch.no_grad():
        assert noise_db(fast(x), model(x)) > 30 and fast(x).dtype == torch.float32
    assert len(products(fast)) == 2


@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
@pytest.mark.parametrize("dtype", [BF16, F16, torch.float64])
def test_inputs_of_another_dtype_are_eagers(dtype: torch.dtype, entry: str) -> None:
    """torchao's layers have the dtype of what they read, where they take it."""
    model, x = block(), noise(3, 64)
    with torch.no_grad():
        fast, _ = optimized(model, entry, x)
        if dtype == torch.float64:
            with pytest.raises(Exception, match="Unsupported input dtype"):
                model(x.to(dtype))
            with pytest.raises(Exception, match="Unsupported input dtype"):
                fast(x.to(dtype))
        else:
            ours, theirs = fast(x.to(dtype)), model(x.to(dtype))
            assert ours.dtype == theirs.dtype == dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
def test_rows_that_are_not_finite(entry: str, number: float) -> None:
    model, x = block(), noise(4, 64)
    with torch.no_grad():
        fast, _ = optimized(model, entry, x)
        x[1, 3] = number
        ours, theirs = fast(x), model(x)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert noise_db(ours[[0, 2, 3]], theirs[[0, 2, 3]]) > 45


class _Reads(nn.Module):
    """A layer whose weight something else reads, too."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(64, 64), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "function":
            return F.linear(x, self.layer.weight, self.layer.bias)
        if self.how == "slice":
            return F.linear(x, self.layer.weight[:32], self.layer.bias[:32])
        return self.layer(x) + x @ self.layer.weight.dequantize()


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
@pytest.mark.parametrize(("how", "count"), [("function", 1), ("slice", 0), ("dequantize", 1)])
def test_other_readers_of_the_weight(how: str, count: int, entry: str) -> None:
    model, x = quantized(_Reads(how)), noise(5, 64)
    with torch.no_grad():
        fast, behind = optimized(model, entry, x)
    assert len(products(behind)) == count
    check(fast, model, x[None])


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, 64), nn.Linear(64, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


@pytest.mark.needs("vnni")
def test_a_table_that_a_quantized_layer_shared() -> None:
    model, ids = quantized(_Tied()), torch.arange(7)[None]
    fast = zendnn_cffi.optimize(model, (ids,), tune="off")
    with torch.no_grad():
        assert noise_db(fast(ids), model(ids)) > 45
    assert len(products(fast)) == 1


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 16)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_layers_that_read_one_value_share_its_integers_and_are_one_product(dtype: torch.dtype) -> None:
    model, x = quantized(_Attention(), "rows", dtype), noise(2, 7, 64, dtype=dtype)
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        assert noise_db(fast(x), model(x)) > LEAST_DB[dtype] - 3
    nodes = [node.target for region in fast.regions().values() for node in region.graph.nodes]
    assert nodes.count(ops.choose_row_scales) == nodes.count(ops.quantize_rows_by) == len(products(fast)) == 1


@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
def test_changed_weights_are_packed_again(entry: str) -> None:
    model, other, x = block(), block(seed=1), noise(3, 64)
    with torch.no_grad():
        fast, _ = optimized(model, entry, x)
        model.load_state_dict(other.state_dict())
        assert noise_db(fast(x), other(x)) > 45 and noise_db(fast(x), other(x)) > 45
        layer: Any = model.up
        layer.weight.scale.mul_(2)
        assert noise_db(fast(x), model(x)) > 45 and noise_db(fast(x), model(x)) > 45


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("change", ["layer", "part", "float"])
def test_parts_that_are_replaced_are_noticed(change: str) -> None:
    x, other = noise(3, 64), block(seed=1)
    fast = zendnn_cffi.optimize(block(), (x,), tune="off")
    model = block()
    with torch.no_grad():
        fast(x)
        for each in (fast.get_submodule("up"), model.up):
            layer: Any = each
            if change == "part":
                layer.weight.qdata = torch.zeros_like(layer.weight.qdata)
            else:
                layer.weight = other.up.weight if change == "layer" else nn.Parameter(noise(48, 64))
        assert noise_db(fast(x), model(x)) > 45 and noise_db(fast(x), model(x)) > 45
    assert len(products(fast)) == (1 if change == "float" else 2)


def test_copied_and_released() -> None:
    model, x = block(), noise(3, 64)
    with torch.no_grad():
        fast = zendnn_cffi.optimize(model, (x,), tune="off")
        expected = fast(x)
        assert torch.equal(copy.deepcopy(fast)(x), expected)
        released = zendnn_cffi.optimize(model, (x,), tune="off", release_weights=True)
        assert torch.equal(released(x), expected) and torch.equal(released(x), expected)
        assert noise_db(model(x), expected) > 45  # whose tensors it shares


@pytest.mark.needs("vnni")
def test_an_exported_program_of_such_layers() -> None:
    """torch.export followed torchao's functions: what is left of the layer are its parts."""
    model, x = block(), noise(3, 64)
    with torch.no_grad():
        fast = zendnn_cffi.optimize(torch.export.export(model, (x,)), tune="off")
        assert noise_db(fast(x), model(x)) > 45
    assert any(dtype == torch.int8 for dtype, _ in products(fast))


@pytest.mark.needs("vnni")
def test_what_is_not_understood_stays_and_is_named() -> None:
    model, x = block(), noise(3, 64)
    up: Any = model.up
    up.weight.act_pre_scale = torch.full((1, 64), 2.0)
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        assert noise_db(fast(x), model(x)) > 45
    assert len(products(fast)) == 1 and "weight is a Int8Tensor" in str(zendnn_cffi.explain(fast))


def test_a_float_block_is_what_it_was() -> None:
    x = noise(3, 64)
    fast = zendnn_cffi.optimize(Block().eval(), (x,), tune="off")
    fast(x)
    assert not products(fast)
