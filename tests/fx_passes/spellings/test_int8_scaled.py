"""Layers that torchao's SmoothQuant and static configurations made: an input is scaled first, or has a known scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zendnn_cffi
from fx_passes.graph.int8_tensor import is_int8_tensor, understood
from tests.fx_passes.spellings.test_int8_linear import noise_db, optimized
from tests.support.int8_tensors import scaled
from tests.support.lowering import noise

BF16 = torch.bfloat16
KINDS = (
    "factor, rows",
    "factor, whole",
    "factor, alone",
    "static",
    "static, zeros",
    "static, asymmetric",
    "factor, static",
    "factor, static, asymmetric",
)


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
@pytest.mark.parametrize("how", KINDS)
def test_float32(how: str, entry: str) -> None:
    model, x = scaled(how), noise(3, 5, 64)
    with torch.no_grad():
        fast, behind = optimized(model, entry, x)
        told = str(zendnn_cffi.explain(behind))
        for source in (x, 5 * x, -x.abs() - 1, x[:1], x.transpose(0, 1)):
            assert noise_db(fast(source), model(source)) > 45
    assert "Int8Tensor" not in told
    assert ("int8 from 11" if "asymmetric" in how else "s8s8s32") in told or "alone" in how


@pytest.mark.parametrize("how", ["factor, rows", "factor, alone"])
def test_bf16(how: str) -> None:
    model, x = scaled(how, BF16), noise(3, 5, 64, dtype=BF16)
    with torch.no_grad():
        fast, behind = optimized(model, "optimize", x)
        assert noise_db(fast(x), model(x)) > 33
    assert "Int8Tensor" not in str(zendnn_cffi.explain(behind))


@pytest.mark.parametrize("how", ["factor, rows", "factor, static, asymmetric"])
def test_numbers_that_change_are_noticed(how: str) -> None:
    model: Any = scaled(how)
    x = noise(3, 5, 64)
    with torch.no_grad():
        fast, _ = optimized(model, "optimize", x)
        model.up.weight.act_pre_scale.mul_(1.5)
        if "static" in how:
            model.down.weight.act_quant_scale.mul_(2)
            model.down.weight.act_quant_zero_point.sub_(3)
        assert noise_db(fast(x), model(x)) > 45


@pytest.mark.parametrize("how", ["factor, rows", "factor, static, asymmetric"])
def test_saved(how: str, tmp_path: Path) -> None:
    x = noise(3, 5, 64)
    with torch.no_grad():
        fast, _ = optimized(scaled(how), "optimize", x)
        zendnn_cffi.save(fast, tmp_path / "model.safetensors")
        loaded = zendnn_cffi.load(tmp_path / "model.safetensors")
        assert torch.equal(loaded(x), fast(x))
    assert "up.weight.act_pre_scale" in loaded.state_dict()


@pytest.mark.parametrize("how", KINDS)
def test_inputs_of_another_dtype_are_no_integers_of_ours(how: str) -> None:
    """Eager's result, or an exception: never one of another dtype."""
    model, x = scaled(how), noise(3, 5, 64, dtype=BF16)
    with torch.no_grad():
        try:
            expected = model(x)
        except RuntimeError:
            return
        try:
            ours = zendnn_cffi.optimize(model, tune="off")(x)
        except TypeError as error:
            assert "quantized layer of torch.float32" in str(error)
            return
        assert ours.dtype == expected.dtype and noise_db(ours, expected) > 30


def _of_rows(weight: Any) -> None:
    weight.act_quant_scale = torch.full((1, 5, 1), 0.04)


def _of_another_dtype(weight: Any) -> None:
    weight.act_quant_scale = weight.act_quant_scale.double()


def _factor_of_another_dtype(weight: Any) -> None:
    weight.act_pre_scale = weight.act_pre_scale.double()


def _factors_of_outputs(weight: Any) -> None:
    weight.act_pre_scale = torch.ones(48, 1)


def _point_without_scale(weight: Any) -> None:
    weight.act_quant_scale = None


@pytest.mark.parametrize(
    "change", [_of_rows, _of_another_dtype, _factor_of_another_dtype, _factors_of_outputs, _point_without_scale]
)
def test_near_misses(change: Any) -> None:
    weight = scaled("factor, static, asymmetric").up.weight
    assert understood(weight) is not None
    change(weight)
    assert is_int8_tensor(weight) and understood(weight) is None
