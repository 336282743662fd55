"""What torchao's PT2E makes of small networks: all of it runs on integers, as near to it as rounding allows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from tests.support.lowering import net, noise
from tests.support.quantized import ran

U8, F32 = torch.uint8, torch.float32


def by_pt2e(model: nn.Module, x: Tensor, *, is_dynamic: bool = False) -> Any:
    """model, quantized for Inductor on x86: observed on four random inputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's, about itself
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=is_dynamic))
        prepared = prepare_pt2e(torch.export.export(model, (x,), strict=True).module(), quantizer)
        with torch.no_grad():
            for seed in range(4):
                prepared(noise(*x.shape, seed=seed))
        return convert_pt2e(prepared)


def _residual(m: Any, x: Tensor) -> Tensor:
    x = F.relu(m[0](x))
    return F.relu(m[2](F.relu(m[1](x))) + x)


def _inverted(m: Any, x: Tensor) -> Tensor:
    x = F.relu6(m[0](x))
    return m[2](F.relu6(m[1](x))) + m[3](x)


def _classifier(m: Any, x: Tensor) -> Tensor:
    return m[1](F.adaptive_avg_pool2d(F.max_pool2d(F.relu(m[0](x)), 2), 1).flatten(1))


def _joined(m: Any, x: Tensor) -> Tensor:
    x = F.relu(m[0](x))
    return m[2](torch.cat([x, F.relu(m[1](x))], 1))


NETS: dict[str, tuple[Callable[..., Any], Sequence[nn.Module], tuple[int, ...], list[str]]] = {
    "residual": (
        _residual,
        (nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1)),
        (2, 3, 17, 16),
        ["convolution"] * 3,
    ),
    "inverted residual": (
        _inverted,
        (nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 24, 1), nn.Conv2d(16, 24, 1)),
        (1, 3, 12, 13),
        ["convolution"] * 4,
    ),
    "classifier": (
        _classifier,
        (nn.Conv2d(3, 16, 3), nn.Linear(16, 10)),
        (2, 3, 14, 14),
        ["convolution", "pooling", "pooling", "product"],
    ),
    "joined": (
        _joined,
        (nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 1), nn.Conv2d(32, 8, 1)),
        (2, 3, 14, 14),
        ["convolution"] * 3,
    ),
    "hardswish and silu": (
        lambda m, x: m[2](F.silu(m[1](F.hardswish(m[0](x))))),
        (nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 8, 1)),
        (2, 3, 14, 14),
        ["convolution"] * 3,
    ),
    "perceptron": (
        lambda m, x: m[2](F.relu(m[1](F.gelu(m[0](x))))),
        (nn.Linear(24, 32), nn.Linear(32, 48), nn.Linear(48, 8)),
        (2, 5, 24),
        ["product"] * 3,
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_all_of_it_runs_on_integers(name: str) -> None:
    function, modules, shape, expected = NETS[name]
    torch.manual_seed(0)
    model, x = net(function, *modules), noise(*shape)
    quantized = by_pt2e(model, x)
    fast = zendnn_cffi.optimize(quantized, (x,), tune="off")
    with torch.no_grad():
        ours, graph, real = fast(x), quantized(x), model(x)
    # of what quantization itself changes, rounding otherwise is a small part
    assert (ours - graph).abs().max() <= 0.25 * (graph - real).abs().max()
    names = {"inner_product": "product", "matmul": "product"}
    found = [(names.get(kind, kind), source) for kind, source, _ in ran(fast) if kind != "concat"]
    assert found == [(kind, U8) for kind in expected]


def test_dynamic_quantization_is_right() -> None:
    torch.manual_seed(0)
    model, x = net(lambda m, x: m[1](F.relu(m[0](x))), nn.Linear(24, 32), nn.Linear(32, 8)), noise(5, 24)
    quantized = by_pt2e(model, x, is_dynamic=True)
    fast = zendnn_cffi.optimize(quantized, (x,), tune="off")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), quantized(x), atol=1e-2, rtol=0)
