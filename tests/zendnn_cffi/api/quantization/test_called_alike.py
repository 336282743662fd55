"""Quantized modules are called as their models are: with arguments left out, by position or by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from tests.support.lowering import noise


class Optionals(nn.Module):
    """Arguments that may be left out, each of which changes the result."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(24, 32), nn.Linear(32, 8)

    def forward(self, x: Any, mask: Any = None, scale: Any = 2.0, *, bias: Any = None, flag: bool = False) -> Any:
        y = self.before(x)
        y = y if mask is None else y * mask
        y = y if bias is None else y + bias
        return self.behind((y.relu() if flag else y) * scale)


class Others(Optionals):
    """The same behind **kwargs."""

    def forward(self, x: Any, mask: Any = None, **others: Any) -> Any:
        return super().forward(x, mask, **others)


X, MASK, BIAS = noise(3, 24), noise(32), noise(32)
CALIBRATED: dict[str, Any] = {
    "one argument": X,
    "none by position": (X, None),
    "none by name": {"x": X, "mask": None},
    "all by name": {"flag": False, "bias": None, "scale": 2.0, "mask": None, "x": X},
    "all by position": (X, None, 2.0),
}
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((X,), {}),
    ((X, None), {}),
    ((X, None, 2.0), {"flag": False}),
    ((), {"x": X}),
    ((X,), {"bias": None, "scale": 2.0}),
]


def _quantized(calibration: Any, model: nn.Module | None = None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = (model or Optionals()).eval()
    return model, zendnn_cffi.quantize(model, [calibration], tune="off", compare=False)


@pytest.mark.parametrize("case", CALIBRATED)
def test_calls_may_leave_out_what_the_model_may(case: str) -> None:
    model, (module, _, converted) = _quantized(CALIBRATED[case])
    for args, kwargs in CALLS:
        with torch.no_grad():
            expected = model(*args, **kwargs)
            assert torch.allclose(module(*args, **kwargs), expected, atol=0.1)
            assert torch.allclose(converted(*args, **kwargs), expected, atol=0.1)
    assert "plain PyTorch" not in str(zendnn_cffi.explain(module))
    for given, named in (({"mask": MASK}, "mask=None, got a Tensor"), ({"bias": BIAS}, "bias=None, got a Tensor")):
        for each in (module, converted):
            with pytest.raises(ValueError, match=f"was quantized for calls with {named}"):
                each(X, **given)
    for given in ({"scale": 3.0}, {"flag": True}):
        for each in (module, converted):
            with pytest.raises((ValueError, AssertionError), match="scale|flag"):
                each(X, **given)
    with pytest.raises(TypeError, match="'x'"):
        module()


def test_what_calibration_gave_may_not_be_left_out() -> None:
    """Nor does the order of names change that of positions."""
    model, (module, _, converted) = _quantized({"flag": True, "bias": BIAS, "x": X})
    for each in (module, converted):
        with torch.no_grad():
            expected = model(X, bias=BIAS, flag=True)
            assert torch.allclose(each(X, bias=BIAS, flag=True), expected, atol=0.1)
            assert torch.allclose(each(X, None, 2.0, flag=True, bias=BIAS), expected, atol=0.1)
        with pytest.raises(ValueError, match="was quantized for calls that have bias"):
            each(X, flag=True)
        with pytest.raises(AssertionError, match="flag"):
            each(X, bias=BIAS)


def test_arguments_of_any_name() -> None:
    model, (module, _, converted) = _quantized({"x": X, "bias": BIAS}, Others())
    for each in (module, converted):
        with torch.no_grad():
            for args, kwargs in (((X,), {"bias": BIAS}), ((X, None), {"bias": BIAS})):
                assert torch.allclose(each(*args, **kwargs), model(*args, **kwargs), atol=0.1)
        with pytest.raises(TypeError, match="bias"):
            each(X)


class Defaults(nn.Module):
    """Defaults that are equal, or of PyTorch, or that no code spells, and the argument in front of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 32)

    def forward(
        self, x: Any, on: bool = True, also: bool = True, one: int = 1, unit: float = 1.0,
        dtype: torch.dtype = torch.float32, least: float = -float("inf"), sizes: Any = (), name: str = "it's",
    ) -> Any:  # fmt: skip
        y = self.layer(x).to(dtype).clamp(min=least) * (one + unit)
        return y if on and also and not sizes and name == "it's" else -y


def test_defaults_that_are_equal_or_that_no_code_spells() -> None:
    for calibration in (X, {"x": X}):
        model, (module, _, converted) = _quantized(calibration, Defaults())
        with torch.no_grad():
            expected = model(X)
            for each in (module, converted, copy.deepcopy(converted)):
                assert torch.allclose(each(X), expected, atol=0.1)
                assert torch.allclose(each(x=X, one=1, sizes=(), dtype=torch.float32), expected, atol=0.1)
                with pytest.raises(ValueError, match="was quantized for calls with one=1, got 2"):
                    each(X, one=2)
                with pytest.raises(ValueError, match="was quantized for calls with unit=1.0, got True"):
                    each(X, unit=True)
                with pytest.raises(ValueError, match="was quantized for calls with least=-inf, got 0.0"):
                    each(X, least=0.0)


@pytest.mark.parametrize("batch_first", (False, True))
def test_attention_modules_are_quantized_themselves(batch_first: bool) -> None:
    attention = nn.MultiheadAttention(32, 4, batch_first=batch_first)
    x = noise(2, 5, 32)
    for calibration in ((x, x, x), {"query": x, "key": x, "value": x}):
        model, (module, report, _) = _quantized(calibration, attention)
        with torch.no_grad():
            for actual, expected in zip(module(x, x, x), model(x, x, x), strict=True):
                assert torch.allclose(actual, expected, atol=0.05)
        assert any(layer.computes_in == "int8" for layer in report.layers), report


@pytest.mark.parametrize("strict", (False, True))
def test_the_converted_graph_is_exported_copied_and_optimized(strict: bool, tmp_path: Path) -> None:
    _, (module, _, converted) = _quantized({"x": X, "mask": None})
    with torch.no_grad():
        expected = converted(X)
        zendnn_cffi.save(module, tmp_path / "module.safetensors")
        loaded = zendnn_cffi.load(tmp_path / "module.safetensors")
        for made in (copy.deepcopy(converted), zendnn_cffi.optimize(converted, (X,), tune="off"), loaded):
            for args, kwargs in CALLS:
                assert torch.allclose(made(*args, **kwargs), expected, atol=0.1)
        for args, kwargs in CALLS[:4]:
            again = torch.export.export(converted, args, kwargs, strict=strict).module()
            assert torch.equal(again(*args, **kwargs), expected)
