"""Products of int8 that torchao writes as products of uint8, where a CPU has VNNI and no AMX."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torchao.kernel import intmm

import zendnn_cffi
from fx_passes.fold.unsigned_products import fold_unsigned_products
from fx_passes.normalize.normalize import normalize
from tests.support.graphs import check_twice
from tests.support.int8_tensors import block, scaled
from tests.support.lowering import net, noise
from tests.support.quantized import ran

Product = Callable[[Tensor, Tensor], Tensor]
I32 = torch.int32


@pytest.mark.parametrize("has_amx", [False, True])
@pytest.mark.parametrize("config", ["rows", "whole, asymmetric", "static"])
def test_programs_for_either_kind_of_cpu_are_the_module(
    config: str, has_amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch.export sees depends on the machine it runs on: both have the operations of the module."""
    model, x = scaled(config) if config == "static" else block(config), noise(3, 5, 64)
    with torch.no_grad():
        module = zendnn_cffi.optimize(model, (x,), tune="off")
        expected = module(x)
        monkeypatch.setattr(intmm, "_cpu_is_vnni_supported", lambda: True)
        monkeypatch.setattr(intmm, "_cpu_is_amx_tile_supported", lambda: has_amx)
        program = torch.export.export(model, (x,))
        assert ("torch.uint8" in str(program.graph)) is not has_amx
        fast = zendnn_cffi.optimize(program, tune="off")
        assert torch.equal(fast(x), expected)
    assert ran(fast) == ran(module)


def unsigned(a: Tensor, b: Tensor, shift: int = 128) -> Tensor:
    return torch._int_mm((a.to(I32) + shift).to(torch.uint8), b)


def two_readers(a: Tensor, b: Tensor) -> Tensor:
    sums = unsigned(a, b)
    return sums - b.sum(0, True, dtype=I32) * 128 + sums


FOLDED: dict[str, Product] = {
    "as torchao": lambda a, b: unsigned(a, b) - b.sum(dim=0, keepdim=True, dtype=I32) * 128,
    "in place": lambda a, b: unsigned(a, b).sub_(b.sum(dim=0, keepdim=True, dtype=I32) * 128),
    "other order": lambda a, b: unsigned(a, b) - 128 * b.sum(-2, dtype=I32),
}
STAYS: dict[str, Product] = {
    "other shift": lambda a, b: unsigned(a, b, 127) - b.sum(0, True, dtype=I32) * 128,
    "other factor": lambda a, b: unsigned(a, b) - b.sum(0, True, dtype=I32) * 127,
    "other sums": lambda a, b: unsigned(a, b) - b.sum(1, dtype=I32) * 128,
    "of 64 bits": lambda a, b: unsigned(a, b) - b.sum(0, True) * 128,
    "other matrix": lambda a, b: unsigned(a, b) - (b * 2).sum(0, True, dtype=I32) * 128,
    "reversed": lambda a, b: b.sum(0, True, dtype=I32) * 128 - unsigned(a, b),
    "two readers": two_readers,
    "in float32": lambda a, b: unsigned(a, b) - b.sum(0, True, dtype=I32) * 128.0,
    "narrow": lambda a, b: torch._int_mm((a + 128).to(torch.uint8), b) - b.sum(0, True, dtype=I32) * 128,
}


@pytest.mark.parametrize("case", [*FOLDED, *STAYS])
def test_the_sums_stay(case: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-128, 128, (24, 24), dtype=torch.int8, generator=generator) for _ in range(2))
    product = (FOLDED | STAYS)[case]
    gm = fold_unsigned_products(normalize(torch.export.export(net(lambda m, a, b: product(a, b)), (a, b)).module()))
    check_twice(gm, fold_unsigned_products)
    assert torch.equal(gm(a, b), product(a, b))
    assert ("uint8" not in str(gm.graph)) is (case in FOLDED)
    if case in FOLDED:
        assert torch.equal(gm(a, b), (a.to(I32) @ b.to(I32)))
