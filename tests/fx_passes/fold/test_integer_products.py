"""torch._int_mm, as torchao's SmoothQuant spells products of integers: exact sums, scales behind them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from tests.support.lowering import check_regions
from tests.support.quantized import ran

S8, F32 = torch.int8, torch.float32


def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=S8)


class SmoothQuant(nn.Module):
    """Torchao's case: [..., K] of int8 by [K, N], scales of rows or of all, scales of columns, a bias."""

    def __init__(self, k: int, n: int, scales: tuple[int, ...], bias: bool, dtype: torch.dtype = F32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.dtype = dtype
        self.register_buffer("b", integers(k, n, seed=2))
        self.register_buffer("a_scale", torch.rand(scales, generator=generator) / 100)
        self.register_buffer("b_scale", torch.rand(n, generator=generator) / 100)
        self.bias = nn.Parameter(torch.randn(n, generator=generator)) if bias else None
        self.eval()

    def forward(self, a: Tensor) -> Tensor:
        c = torch._int_mm(a.reshape(-1, a.size(-1)), self.b).to(self.dtype)
        c = c * self.a_scale.expand(c.shape)
        c = c * self.b_scale
        c = c if self.bias is None else c + self.bias
        return c.reshape(*a.shape[:-1], c.size(-1))


def optimized(model: nn.Module, *inputs: Tensor) -> list[tuple[str, torch.dtype, str]]:
    fast = zendnn_cffi.optimize(model, inputs, tune="off")
    with torch.no_grad():
        torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-6, atol=1e-5)
    check_regions(fast)
    return [call for call in ran(fast) if call[0] in ("inner_product", "matmul")]


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("shape", "scales"), [((33, 48), (1,)), ((33, 48), (33, 1)), ((3, 11, 48), (33, 1))])
def test_smooth_quant(shape: tuple[int, ...], scales: tuple[int, ...], bias: bool) -> None:
    ((_, source, implementation),) = optimized(SmoothQuant(shape[-1], 40, scales, bias), integers(*shape))
    assert source == S8 and not implementation.startswith("ref")


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("cast", [lambda x: x.to(F32), lambda x: x.float(), lambda x: x.to(dtype=F32)])
def test_the_largest_sums_are_exact(cast: Callable[[Tensor], Tensor]) -> None:
    class Extreme(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", torch.full((1024, 24), -128, dtype=S8))

        def forward(self, a: Tensor) -> Tensor:
            return cast(torch._int_mm(a, self.b))

    a = torch.full((32, 1024), -128, dtype=S8)
    a[::2] = 127
    fast = zendnn_cffi.optimize(Extreme().eval(), (a,), tune="off")
    assert torch.equal(fast(a), Extreme()(a)) and [call[1] for call in ran(fast)] == [S8]


@pytest.mark.needs("vnni")
def test_two_values() -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch._int_mm(a, b).to(F32) * 0.25

    inputs = integers(33, 48), integers(48, 24, seed=5)
    fast = zendnn_cffi.optimize(torch.export.export(Two().eval(), inputs), tune="off")  # sizes are known
    assert torch.equal(fast(*inputs), Two()(*inputs))
    assert [(kind, source) for kind, source, _ in ran(fast)] == [("matmul", S8)]


@pytest.mark.parametrize("reason", ["integers are read", "another dtype", "long sums"])
def test_other_products_stay_as_they_are(reason: str) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", integers(2048 if reason == "long sums" else 48, 24, seed=2))

        def forward(self, a: Tensor) -> Tensor:
            c = torch._int_mm(a, self.b)
            if reason == "another dtype":
                return c.to(torch.float64)
            return c.to(F32) + (c if reason == "integers are read" else 1.0)

    model, a = Other().eval(), integers(33, 2048 if reason == "long sums" else 48)
    fast = zendnn_cffi.optimize(model, (a,), tune="off")
    assert torch.equal(fast(a), model(a))
    assert not [call for call in ran(fast) if call[0] in ("inner_product", "matmul")]
