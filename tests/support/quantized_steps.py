"""Modules and steps that quantize and dequantize by operators, in every form: what random networks are made of."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.random_networks import Steps

decomposed = torch.ops.quantized_decomposed
RANGES = {
    torch.uint8: (0, 255),
    torch.int8: (-128, 127),
    torch.int16: (-(2**15), 2**15 - 1),
    torch.int32: (-(2**31), 2**31 - 1),
}
FORMS = ("float", "tensor", "tensor2", "affine", "channel")


class Scale(nn.Module):
    """A scale and zero point in one of the forms: quantize and dequantize with them."""

    def __init__(
        self,
        form: str,
        scale: Any,
        zero_point: Any,
        dtype: torch.dtype,
        limits: tuple[int, int],
        axis: int = 0,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.form, self.dtype, self.limits, self.axis, self.out_dtype = form, dtype, limits, axis, out_dtype
        self.numbers = scale, zero_point
        self.register_buffer("scale", torch.as_tensor(scale, dtype=torch.float32))
        self.register_buffer("zero_point", torch.as_tensor(zero_point, dtype=torch.int64))
        self.register_buffer("low", torch.tensor(limits[0]))
        self.register_buffer("high", torch.tensor(limits[1]))

    def quantize(self, x: Tensor) -> Tensor:
        match self.form:
            case "float":
                return decomposed.quantize_per_tensor.default(x, *self.numbers, *self.limits, self.dtype)
            case "tensor":
                return decomposed.quantize_per_tensor.tensor(x, self.scale, self.zero_point, *self.limits, self.dtype)
            case "tensor2":
                return decomposed.quantize_per_tensor.tensor2(
                    x, self.scale, self.zero_point, self.low, self.high, self.dtype
                )
            case "channel":
                return decomposed.quantize_per_channel.default(
                    x, self.scale, self.zero_point, self.axis, *self.limits, self.dtype
                )
        return torch.ops.torchao.quantize_affine.default(
            x, list(x.shape), self.scale, self.zero_point, self.dtype, *self.limits
        )

    def dequantize(self, x: Tensor) -> Tensor:
        out = {} if self.out_dtype is None else {"out_dtype": self.out_dtype}
        match self.form:
            case "float":
                return decomposed.dequantize_per_tensor.default(x, *self.numbers, *self.limits, self.dtype, **out)
            case "tensor":
                return decomposed.dequantize_per_tensor.tensor(
                    x, self.scale, self.zero_point, *self.limits, self.dtype, **out
                )
            case "tensor2":
                return decomposed.dequantize_per_tensor.tensor2(
                    x, self.scale, self.zero_point, self.low, self.high, self.dtype, **out
                )
            case "channel":
                return decomposed.dequantize_per_channel.default(
                    x, self.scale, self.zero_point, self.axis, *self.limits, self.dtype, **out
                )
        return torch.ops.torchao.dequantize_affine.default(
            x,
            list(x.shape),
            self.scale,
            self.zero_point,
            self.dtype,
            *self.limits,
            output_dtype=self.out_dtype or torch.float32,
        )


WEIGHTS = ("channel",) * 8 + ("tensor", "affine", "zero points", "axis 1", "uint8", "groups", "quantized here", "real")


class Weight(nn.Module):
    """Weights [O, ...] near what keeps values near one, and a bias or none; calling it gives them as real numbers."""

    def __init__(self, r: random.Random, shape: tuple[int, ...], outputs: int, form: str, bias: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(r.randrange(1 << 30))
        fan = max(torch.Size(shape).numel() // outputs, 1)
        real = torch.randn(shape, generator=generator) * (1.5 / fan) ** 0.5
        self.form = form
        self.bias = nn.Parameter(torch.randn(outputs, generator=generator) * 0.2) if bias else None
        if form in ("real", "quantized here"):
            self.real = nn.Parameter(real)
        axis = 1 if form == "axis 1" else 0
        dtype = torch.uint8 if form == "uint8" else torch.int8
        many = form not in ("tensor", "uint8")
        largest = real.abs().amax([d for d in range(len(shape)) if d != axis]) if many else real.abs().max()
        scale = (largest / r.choice((127.0, 127.0, 60.0, 300.0))).clamp(min=1e-6)
        zero = torch.zeros_like(scale, dtype=torch.int64)
        if form == "zero points":
            zero = torch.randint(-9, 9, scale.shape, generator=generator)
        if form == "uint8":
            zero += 128
        if form == "groups":
            self.group = r.choice([n for n in (1, 2, 4, shape[1]) if shape[1] % n == 0])
            parts = real.view(shape[0], shape[1] // self.group, self.group, *shape[2:])
            scale = parts.abs().amax([d for d in range(len(shape) + 1) if d not in (0, 1)]) / 127.0 + 1e-6
            scale = scale.view(shape[0], -1, *(1,) * (len(shape) - 2))
            zero = torch.zeros_like(scale, dtype=torch.int64)
            self.scale = Scale("affine", scale, zero, dtype, RANGES[dtype])
            wide = scale.repeat_interleave(self.group, 1)
            kept = (real / wide).round().clamp(-128, 127).to(dtype)
        else:
            self.scale = Scale("channel" if many else "tensor", scale, zero, dtype, RANGES[dtype], axis)
            kept = self.scale.quantize(real)
        if form not in ("real", "quantized here"):
            self.register_buffer("kept", kept)
        self.sizes = list(shape[1:])

    def forward(self) -> Tensor:
        match self.form:
            case "real":
                return self.real
            case "quantized here":
                return self.scale.dequantize(self.scale.quantize(self.real))
            case "groups" | "affine":
                sizes = [1, *self.sizes]
                if self.form == "groups":
                    sizes[1] = self.group
                return torch.ops.torchao.dequantize_affine.default(
                    self.kept, sizes, self.scale.scale, self.scale.zero_point, self.kept.dtype
                )
        return self.scale.dequantize(self.kept)


CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
MAX_POOLS = {1: torch.max_pool1d, 2: torch.max_pool2d, 3: torch.max_pool3d}
AVG_POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.75),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "clamp": lambda x: x.clamp(-1.0, 0.25),
    "scaled": lambda x: x * 0.75 + 0.125,
    "negative": lambda x: x * -0.5,
    "softmax": lambda x: x.softmax(-1),
    "softmax 1": lambda x: x.softmax(1),
}
MOVES: dict[str, Callable[[Tensor], Tensor]] = {  # of numbers or of integers
    "slice 1": lambda x: x[:, 1:],
    "slice last": lambda x: x[..., :-1],
    "every other": lambda x: x[..., ::2],
    "swap": lambda x: x.transpose(1, -1),
    "swap and copy": lambda x: x.transpose(1, -1).contiguous(),
    "flat": lambda x: x.flatten(1),
    "one row": lambda x: x.flatten(1).unsqueeze(1),
    "and back": lambda x: x.reshape(x.shape[0], -1).view(x.shape),
    "chunk 0": lambda x: x.chunk(2, 1)[0],
    "chunk -1": lambda x: x.chunk(2, 1)[-1],
    "select": lambda x: x[:, :, 0],
    "flip": lambda x: x.flip(1),
    "rows of channels": lambda x: x.flatten(2).transpose(1, 2),
    "copy": lambda x: x.clone(),
}
PADS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: F.pad(x, (1, 0)),
    "a number": lambda x: F.pad(x, (0, 1), value=0.5),
    "channels": lambda x: F.pad(x, (0, 0, 1, 0)),
}
BINARY = (torch.add, torch.add, torch.add, torch.sub, torch.mul, torch.maximum)
READ_INTEGERS = ("convolution", "linear", "product", "attention", "max", "average", "adaptive", "concat", "broadcast")
CHOICES = ("whole", "symmetric", "token", "token asymmetric", "affine whole", "affine rows", "affine rows symmetric")


def dynamic(how: str, x: Tensor) -> Tensor:
    """x through integers of a scale of the call."""
    match how:
        case "whole":
            scale, zero = decomposed.choose_qparams.tensor(x, 0, 255, 1e-5, torch.uint8)
            q = decomposed.quantize_per_tensor.tensor(x, scale, zero, 0, 255, torch.uint8)
            return decomposed.dequantize_per_tensor.tensor(q, scale, zero, 0, 255, torch.uint8)
        case "symmetric":
            scale, zero = decomposed.choose_qparams_symmetric.tensor(x, -127, 127, 1e-5, torch.int8)
            q = decomposed.quantize_per_tensor.tensor(x, scale, zero, -127, 127, torch.int8)
            return decomposed.dequantize_per_tensor.tensor(q, scale, zero, -127, 127, torch.int8)
        case "token" | "token asymmetric":
            name = "choose_qparams_per_token" + ("_asymmetric" if "asymmetric" in how else "")
            scale, zero = getattr(decomposed, name).default(x, torch.int8)
            q = decomposed.quantize_per_token.default(x, scale, zero, -128, 127, torch.int8)
            return decomposed.dequantize_per_token.default(q, scale, zero, -128, 127, torch.int8, torch.float32)
    sizes = list(x.shape) if "whole" in how else [1] * (x.dim() - 1) + [x.shape[-1]]
    kind, dtype = ("SYMMETRIC", torch.int8) if "symmetric" in how else ("ASYMMETRIC", torch.uint8)
    ao = torch.ops.torchao
    scale, zero = ao.choose_qparams_affine.default(x, kind, sizes, dtype)
    q = ao.quantize_affine.default(x, sizes, scale, zero, dtype)
    return ao.dequantize_affine.default(q, sizes, scale, zero, dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, shares: Scale | None) -> Tensor:
    """[N, L, C] each."""
    weights = (q @ k.transpose(-2, -1) * 0.4).softmax(-1)
    if shares is not None:
        weights = shares.dequantize(shares.quantize(weights))
    return weights @ v


class QuantizedSteps(Steps):
    """Values of two to five dimensions, real or integers."""

    def step(self, kind: str, rest: list[Any], module: Any, values: list[Tensor]) -> Tensor:
        a = values[rest[0]]
        match kind:
            case "quantize":
                return module.quantize(a)
            case "dequantize":
                return module.dequantize(a)
            case "real":
                return a.float()
            case "dynamic":
                return dynamic(rest[1], a)
            case "convolution":
                return rest[1](a, module(), module.bias, **rest[2])
            case "linear":
                return F.linear(a, module(), module.bias)
            case "activation":
                return ACTIVATIONS[rest[1]](a)
            case "move":
                return MOVES[rest[1]](a)
            case "pad":
                return PADS[rest[1]](a)
            case "binary":
                return BINARY[rest[2]](a, values[rest[1]])
            case "mean":
                return a.mean(rest[1], keepdim=rest[2])
            case "broadcast":
                return a * a.mean(rest[1], keepdim=True)
            case "concat":
                return torch.cat([a, *(values[i] for i in rest[2:])], rest[1])
            case "pool":
                return rest[1](a, *rest[2:])
            case "product":
                return a @ values[rest[1]].transpose(-2, -1) * 0.3
            case "attention":
                return attend(a, values[rest[1]], values[rest[2]], module if isinstance(module, Scale) else None)
            case "norm":
                return module(a)
        raise AssertionError(kind)
