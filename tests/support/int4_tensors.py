"""Models whose linear layers torchao gave weights of 4 bits."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig
from torchao.quantization import quantize_

from tests.support.int8_tensors import Block


def quantized(model: nn.Module, group: int = 32, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A copy of model in dtype, its linear layers with weights of 4 bits."""
    made = copy.deepcopy(model).eval().to(dtype)
    quantize_(made, PrototypeInt4WeightOnlyConfig(group_size=group, set_inductor_config=False))
    return made


def block(
    dtype: torch.dtype = torch.bfloat16,
    *,
    group: int = 32,
    sizes: tuple[int, int] = (128, 224),
    asks: bool = False,
    seed: int = 0,
) -> nn.Module:
    """A quantized Block of the same weights for the same seed; 224 outputs are no whole number of blocks."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return quantized(Block(*sizes, asks=asks), group, dtype)


def packed(n: int, k: int, group: int = 32, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Any:
    """(integers int32 [N, K], packed, scales): any weights as this process packs them."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(0, 16, (n, k), dtype=torch.int32, generator=generator)
    scales = torch.rand(k // group, n, 2, generator=generator).add_(0.5).div_(k**0.5)
    scales[..., 1].mul_(0.3)
    return integers, torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1), scales.to(dtype)


def exact(integers: Tensor, scales: Tensor, group: int) -> Tensor:
    """The weights [N, K] in float64."""
    scale, zero = (scales[..., i].double().t().repeat_interleave(group, 1) for i in (0, 1))
    return (integers - 8).double() * scale + zero


def exact_weight(weight: Any) -> Tensor:
    """The weights of an Int4OpaqueTensor in float64, read by its kernel: products with ones and zeros are exact."""
    n, k = weight.shape
    ones = torch.eye(k)
    numbers = torch.ones(k // weight.block_size[1], n, 2) * torch.tensor([1.0, 0.0])
    kernel = torch.ops.aten._weight_int4pack_mm_for_cpu
    integers = kernel(ones, weight.qdata, weight.block_size[1], numbers).t().double() + 8
    return exact(integers, weight.scale_and_zero, weight.block_size[1])
