"""Kinds that differ for integers alone are one kind to the library, and to what is remembered of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from fx_passes.lower.post_ops import EltwisePostOp, as_of_floats, translate_eltwise
from fx_passes.region.key import region_key
from tests.support.lowering import net, noise


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
