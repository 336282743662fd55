"""Random networks of quantize and dequantize operators compute what eager does, by every entry.

Each result lies between what rounding midway numbers up and down makes of it (tests/support/bounds.py).
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.saved.errors import NotSaved
from tests.fx_passes.test_pt2e import by_pt2e
from tests.support.bounds import bounds, outside
from tests.support.lowering import noise, tensors
from tests.support.quantized import ran
from tests.support.random_quantized import random_network

pytest.importorskip("torchao")

INTEGERS = (torch.uint8, torch.int8)
PRODUCTS = {"convolution", "inner_product", "matmul"}


def check(fast: Any, model: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> None:
    """Results of two calls are equal bits, and lie within the bounds, as eager's do."""
    before = x.clone()
    with torch.no_grad():
        ours, again, eager = tensors(fast(x)), tensors(fast(x)), tensors(model(x))
    assert torch.equal(x, before), "the input was changed"
    for mine, second, theirs, expected in zip(ours, again, eager, bounds(model, x, dtype), strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        assert torch.equal(mine, second), "two calls differ"
        if not mine.numel():
            continue
        size = torch.maximum(expected.low.abs(), expected.high.abs()).max().item()
        slack = (3e-6 if dtype is None else 1e-2) * size + 1e-30
        assert outside(theirs, expected).max() <= slack, "the bounds do not hold eager's result"
        assert outside(mine, expected).max() <= slack


def products_of_integers(fast: Any) -> int:
    return sum(kind in PRODUCTS and source in INTEGERS for kind, source, _ in ran(fast))


@pytest.mark.needs("vnni")
def test_random_networks_equal_eager() -> None:
    """Traced, by example, and as an exported program; with another number of samples, and strided."""
    found = 0
    for seed in range(24):
        model, x = random_network(random.Random(seed))
        way = ("traced", "example", "program")[seed % 3]
        given: Any = torch.export.export(model, (x,)) if way == "program" else model
        fast = zendnn_cffi.optimize(given, (x,) if way == "example" else None, tune="off")
        check(fast, model, x)
        found += products_of_integers(fast)
        if way == "traced":
            other = noise(x.shape[0] + 1, *x.shape[1:])
            check(fast, model, other.transpose(0, -1).contiguous().transpose(0, -1))
    assert found >= 8


@pytest.mark.parametrize(("dtype", "tune", "seeds"), [(torch.bfloat16, "off", 4), (None, "full", 1)], ids=str)
def test_random_networks_with_other_options(dtype: torch.dtype | None, tune: str, seeds: int) -> None:
    for seed in range(100, 100 + seeds):
        model, x = random_network(random.Random(seed))
        check(zendnn_cffi.optimize(model, (x,), tune=tune, dtype=dtype), model, x, dtype)


def test_random_networks_by_torch_compile() -> None:
    for seed in (200,):
        model, x = random_network(random.Random(seed))
        torch._dynamo.reset()
        check(torch.compile(copy.deepcopy(model), backend="zendnn", options={"tune": "off"}), model, x)


def test_random_networks_from_files(tmp_path: Path) -> None:
    """Layers that share one scale have two names for it; files hold no operators of others."""
    saved = 0
    for seed in range(300, 306):
        model, x = random_network(random.Random(seed))
        fast = zendnn_cffi.optimize(model, (x,), tune="off")
        fast(x)
        try:
            zendnn_cffi.save(fast, tmp_path / "network")
        except NotSaved:
            continue
        saved += 1
        check(zendnn_cffi.load(tmp_path / "network"), model, x)
    assert saved >= 2


@pytest.mark.parametrize("seed", [400, 403, 404, 405])
def test_random_networks_by_pt2e(seed: int) -> None:
    """Networks of floats that torchao quantizes; some of them by scales of the call."""
    model, x = random_network(random.Random(seed), is_float=True)
    quantized = by_pt2e(model, x, is_dynamic=seed % 3 == 0, matmuls=seed % 2 == 0)
    check(zendnn_cffi.optimize(quantized, (x,), tune="off"), quantized, x)
