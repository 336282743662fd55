"""Post-ops as the library takes them: kinds that differ for integers alone are one kind, linear functions one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from fx_passes.lower.post_ops import EltwisePostOp, PostOp, append_post_ops, as_linear, as_of_floats, translate_eltwise
from fx_passes.region.key import region_key
from tests.support.lowering import kinds, net, noise


def test_the_librarys_names() -> None:
    assert as_of_floats("eltwise(x_hardtanh, hardtanh, 0.0, 6.0)") == "eltwise(x_hardtanh, clip, 0.0, 6.0)"
    assert translate_eltwise("hardtanh", -1, 2.5) == (EltwisePostOp("clip", -1.0, 2.5),)
    assert translate_eltwise("clamp_min", 0, 0.0) == (EltwisePostOp("relu", 0.0, 0.0),)


def test_one_key_for_equal_work(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []

    def noting(*about: Any) -> str:
        keys.append(region_key(*about))
        return keys[-1]

    monkeypatch.setattr("fx_passes.region.variants.region_key", noting)
    forwards = lambda m, x: F.relu6(m[0](x)), lambda m, x: m[0](x).clamp(0.0, 6.0), lambda m, x: F.hardtanh(m[0](x))
    for forward in forwards:
        model = net(forward, nn.Conv2d(3, 4, 1))
        with torch.no_grad():
            zendnn_cffi.optimize(model, tune_seconds=0)(noise(1, 3, 5, 5))
    assert len(keys) == 3 and keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    "fn",
    (
        lambda y: (y + 12582912.0) - 12582912.0,  # rounds to integers
        lambda y: (y * 4 + 2.0**23) * 0.5 - 2.0**22,
        lambda y: F.hardsigmoid((y + 2.0**23) - 2.0**23),
        lambda y: F.relu(y) * 1e30 * 1e30,  # 0, or infinite
        lambda y: y * 1e-30 * 1e-30 * 1e30 * 1e30,
        lambda y: F.relu(y) / 1e-39,
        lambda y: y / 4e37 / 4e37 * 1e37 * 1e37,
        lambda y: (y * 2 + 1) * float("inf"),
        lambda y: (y * 2 - 3) / 4 + 1,
        lambda y: (1 - y) * -1e9,
        lambda y: y * 0 + 1,
    ),
)
def test_linear_functions_of_linear_functions(fn: Any) -> None:
    """Numbers of few digits, so that the product is exact."""
    layer = nn.Linear(4, 24)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-8, 9, (24, 4), generator=torch.Generator().manual_seed(0)) / 8)
        layer.bias.copy_(torch.arange(24) / 8)
        x = torch.randint(-3, 4, (5, 4), generator=torch.Generator().manual_seed(1)).float()
        model = net(lambda m, x: fn(m[0](x)), layer)
        fast = zendnn_cffi.optimize(model, tune="off")
        ours, expected = fast(x), model(x)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7, equal_nan=True)  # a sixth is no float32 number
    assert "inner_product" in kinds(zendnn_cffi.explain(fast))


def test_which_become_one() -> None:
    def joined(*functions: tuple[float, float]) -> list[PostOp] | None:
        found: list[PostOp] | None = []
        for function in functions:
            found = None if found is None else append_post_ops(found, (EltwisePostOp("linear", *function),))
        return found

    assert joined((1.0, -123.675), (1 / 58.395, 0.0), (2.0, 1.0)) and joined((-1.0, 1.0), (-1e9, 0.0))
    assert joined((2.0, 3.0), (0.0, 1.0)) == [EltwisePostOp("linear", 0.0, 1.0)]
    assert joined((1.0, 2.0**23), (1.0, -(2.0**23))) is None and joined((1e-30, 0.0), (1e-30, 0.0)) is None
    assert as_linear("div", 1e-39) is None and as_linear("div", 4.0) == EltwisePostOp("linear", 0.25, 0.0)
