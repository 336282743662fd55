"""bfloat16 on CPUs without AVX-512: float32 inside of regions, as nobody has fast kernels for bfloat16 there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from tests.support.cpu import take_away
from tests.support.lowering import offload, oracle, tensors
from tests.support.small_networks import NETWORKS, images, linear_by_torch, rows
from tests.tolerance import assert_close

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the library has AVX2 alone."""
    take_away("avx512", monkeypatch)


@pytest.mark.parametrize("tune", ["off", "full"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_in_bf16_is_computed_in_float32(name: str, tune: str) -> None:
    """Nearer to float64 than eager, in its dtype; a candidate is as right as the reference in bf16 can tell."""
    torch.manual_seed(0)
    model, x = NETWORKS[name]()
    model, x = model.bfloat16(), x.bfloat16()
    fast = zendnn_cffi.optimize(model, (x,), tune=tune)
    with torch.no_grad():
        ours, theirs, expected = fast(x), model(x), oracle(model, (x,))[0]
    assert ours.dtype == BF16 and (ours - expected).norm() <= (theirs - expected).norm()
    assert_close(ours, expected, dtype=BF16, k=144, scale=float(expected.abs().max()))
    found = zendnn_cffi.explain(fast)
    layers = [node for node in found.nodes if node.became in ("convolution", "inner_product", "matmul")]
    assert len(layers) == sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules()) or tune == "full"
    assert all("float32" in node.layout for node in layers) and (layers or tune == "full")  # else by what was faster
    assert not any("right numbers" in node.reason for node in found.nodes)


def test_asking_for_bf16_changes_nothing() -> None:
    torch.manual_seed(0)
    model, x = images()
    offload(model, x, dtype=BF16)
    fasts = [zendnn_cffi.optimize(model, dtype=dtype, tune="off") for dtype in (None, BF16)]
    with torch.no_grad():
        assert torch.equal(*(fast(x) for fast in fasts))


def test_pytorchs_product_of_one_row_is_a_rival_in_bf16() -> None:
    """It reads half the memory. Of more rows, and of convolutions, it is none: it takes several times as long."""
    assert linear_by_torch((1, 64), BF16) == linear_by_torch((1, 1, 64), BF16) == [BF16]
    assert linear_by_torch((2, 64), BF16) == []


def test_saved_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = rows()
    model, x = model.bfloat16(), x.bfloat16()
    fast: Any = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        expected = tensors(fast(x))[0]
        zendnn_cffi.save(fast, tmp_path / "rows.safetensors")
        assert torch.equal(zendnn_cffi.load(tmp_path / "rows.safetensors")(x), expected)
