"""Networks of quantized values as torchao's PT2E writes them, without torchao: a quantize and a dequantize for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
from torch import Tensor, nn

import zendnn_cffi
from tests.support.lowering import check_regions, tensors

decomposed = torch.ops.quantized_decomposed
RANGES = {torch.uint8: (0, 255), torch.int8: (-128, 127)}


def kept(value: Tensor, scale: float, zero_point: int = 0, dtype: torch.dtype = torch.uint8) -> Tensor:
    """value as integers."""
    return decomposed.quantize_per_tensor.default(value, scale, zero_point, *RANGES[dtype], dtype)


def real(integers: Tensor, scale: float, zero_point: int = 0, dtype: torch.dtype = torch.uint8) -> Tensor:
    """What integers stand for. The dtype is said, as tracers cannot ask a value for its own."""
    return decomposed.dequantize_per_tensor.default(integers, scale, zero_point, *RANGES[dtype], dtype)


def through(value: Tensor, scale: float, zero_point: int = 0, dtype: torch.dtype = torch.uint8) -> Tensor:
    """value, rounded to what integers can stand for."""
    return real(kept(value, scale, zero_point, dtype), scale, zero_point, dtype)


class Weight(nn.Module):
    """int8 weights with a scale for each output, and a bias; calling it gives both as real numbers."""

    def __init__(self, *shape: int, bias: bool = True, seed: int = 0) -> None:
        super().__init__()
        self.spatial = len(shape) - 2
        generator = torch.Generator().manual_seed(seed + sum(shape))
        size = torch.tensor(shape[1:]).prod().item() ** 0.5
        self.register_buffer("integers", torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8))
        self.register_buffer("scales", (torch.rand(shape[0], generator=generator) + 0.5) / (64 * size))
        self.register_buffer("zero_points", torch.zeros(shape[0], dtype=torch.int64))
        self.bias = nn.Parameter(torch.randn(shape[0], generator=generator)) if bias else None

    def forward(self) -> Tensor:
        arguments = (self.integers, self.scales, self.zero_points, 0, -128, 127, torch.int8)
        return decomposed.dequantize_per_channel.default(*arguments)


class Integers(nn.Module):
    """function(weights, *inputs), in evaluation mode."""

    def __init__(self, function: Callable[..., Any], *weights: Weight) -> None:
        super().__init__()
        self.function, self.weights = function, nn.ModuleList(weights)
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self.function(self.weights, x)


def ran(fast: Any) -> list[tuple[str, torch.dtype, str]]:
    """(kind, dtype of the source, implementation) of each call that ran, reorders left out."""
    programs = [lowered.program for region in fast.regions().values() for lowered in region.lowered.values() if lowered]
    calls = [call for program in programs for call in program.calls if call.kind != "reorder"]
    return [(call.kind, call.dtype, call.implementation) for call in calls]


def reorders(fast: Any) -> list[tuple[torch.dtype, torch.dtype]]:
    """(source, destination) dtypes of the reorders that ran."""
    programs = [lowered.program for region in fast.regions().values() for lowered in region.lowered.values() if lowered]
    calls: Sequence[Any] = [call for program in programs for call in program.calls if call.kind == "reorder"]
    return [(call.primitive.pd.src_desc.dtype, call.primitive.pd.dst_desc.dtype) for call in calls]


def optimized(
    model: nn.Module, x: Tensor, steps: float = 1.0, scale: float = 0.0, most_apart: float = 0.02, **options: Any
) -> Any:
    """model through optimize, compared with eager: at most `steps` of scale apart (integers: of 1), and seldom so.

    most_apart  share of the numbers that may be a step apart: those midway between two integers

    Also: equal bits on the second call, and with dead memory full of NaN.
    """
    fast = zendnn_cffi.optimize(model, (x,), **{"tune": "off", **options})
    with torch.no_grad():
        first, second, eager = tensors(fast(x)), tensors(fast(x)), tensors(model(x))
    for ours, again, theirs in zip(first, second, eager, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype) and torch.equal(ours, again)
        assert theirs.unique().numel() > 2, "all of it saturated"
        apart = (ours.double() - theirs.double()).abs() / (scale or 1.0)
        assert apart.max() <= steps + 1e-3
        if scale or not theirs.is_floating_point():
            assert (apart > 0.5).double().mean() < most_apart
    check_regions(fast)
    return fast
