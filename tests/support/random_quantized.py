"""Random networks of quantize and dequantize operators, in every form and with odd numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.quantized_steps import (
    ACTIVATIONS,
    ADAPTIVE,
    AVG_POOLS,
    BINARY,
    CHOICES,
    CONVOLUTIONS,
    FORMS,
    MAX_POOLS,
    MOVES,
    PADS,
    RANGES,
    TRANSPOSED,
    WEIGHTS,
    QuantizedSteps,
    Scale,
    Weight,
)


@dataclass
class Draft:
    """A network while it grows, with the value of each step on its input; is_float: no quantize in it."""

    r: random.Random
    x: Tensor
    is_float: bool = False
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    parts: list[nn.Module | None] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    scales: dict[int, Scale] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values.append(self.x)
        self.model = QuantizedSteps([], [], [])

    def add(self, kind: str, *rest: Any, part: nn.Module | None = None) -> int:
        """A step; returns the number of its value."""
        with torch.no_grad():
            value = self.model.step(kind, list(rest), part, self.values)
        self.steps.append((kind, *rest))
        self.parts.append(part)
        self.values.append(value)
        return len(self.values) - 1

    def scale_for(self, number: int) -> Scale:
        """A scale that suits value number, or one that does not."""
        r, value = self.r, self.values[number].float()
        lowest, highest = min(value.min().item(), 0.0), max(value.max().item(), 0.0)
        dtype = r.choice((torch.uint8,) * 5 + (torch.int8,) * 5 + (torch.int16, torch.int32))
        limits = RANGES[dtype]
        if r.random() < 0.12:
            limits = {
                torch.uint8: r.choice(((0, 127), (1, 255), (0, 15))),
                torch.int8: r.choice(((-127, 127), (0, 127), (-8, 7))),
            }.get(dtype, (-(2**14), 2**14))
        low, high = (max(limits[0], -(2**14)), min(limits[1], 2**14))
        spread = max(highest - lowest, 1e-3)
        scale = spread / (high - low) * r.choice((1.0,) * 12 + (0.4, 0.4, 2.0, 2.0, 0.9, 0.9, 1e-3, 1e3))
        zero = round(low - lowest / scale)
        if r.random() < 0.25:
            zero = r.choice((low, high, 0, (low + high) // 2, low + 1))
        if r.random() < 0.15:  # numbers that are exact, so that many lie in the middle of two integers
            scale = 2.0 ** round(torch.tensor(scale).log2().item())
        zero = max(min(zero, high), low)
        form = r.choice(FORMS[:1] * 4 + FORMS)
        out = torch.bfloat16 if r.random() < 0.04 else None
        if form == "channel":
            axis = r.randrange(1, value.dim())
            n = value.shape[axis]
            generator = torch.Generator().manual_seed(r.randrange(1 << 30))
            many = scale * (0.5 + torch.rand(n, generator=generator))
            zeros = (zero + torch.randint(-3, 4, (n,), generator=generator)).clamp(low, high)
            return Scale(form, many, zeros, dtype, limits, axis, out)
        return Scale(form, scale, zero, dtype, limits, 0, out)

    def through(self, number: int, scale: Scale | None = None) -> int:
        """Value number through integers."""
        if self.is_float:
            return number
        scale = scale or self.scale_for(number)
        kept = self.add("quantize", number, part=scale)
        self.scales[kept] = scale
        return self.real(kept)

    def real(self, kept: int) -> int:
        scale = self.scales[kept]
        number = self.add("dequantize", kept, part=scale)
        if scale.out_dtype is not None:
            number = self.add("real", number)
        return number

    def of(self, fits: Callable[[Tensor], bool], last: int | None = None) -> int | None:
        """The number of a real value that fits, the last ones most of the time."""
        found = [i for i, v in enumerate(self.values) if v.dtype == torch.float32 and fits(v)]
        if not found:
            return None
        if last in found and self.r.random() < 0.7:
            return last
        return self.r.choice(found[-4:] if self.r.random() < 0.7 else found)

    def grow(self) -> None:
        """A layer more."""
        r = self.r
        a = self.of(lambda v: v.numel() > 0, len(self.values) - 1)
        assert a is not None
        value = self.values[a]
        kinds = ["activation", "move", "binary", "pad", "mean", "norm", "concat", "integers"]
        if value.dim() > 2:
            kinds += ["convolution"] * 6 + ["max", "average", "average", "adaptive", "broadcast"]
        if value.dim() <= 3:
            kinds += ["linear"] * 6 + (["product", "attention"] if value.dim() == 3 else [])
            kinds += ["dynamic"] if value.shape[-1] > 1 else []
        kind = r.choice(kinds)
        if kind in (
            "convolution",
            "linear",
            "product",
            "attention",
            "max",
            "average",
            "adaptive",
            "concat",
            "broadcast",
        ):
            if r.random() < 0.85:
                a = self.through(a)
        elif r.random() < 0.35:
            a = self.through(a)
        made = getattr(self, f"_{kind}")(a)
        if made is None or self.values[made].numel() == 0:
            return
        if r.random() < 0.35 and kind != "activation":
            made = self._activation(made)
        if r.random() < 0.5:
            made = self.through(made)

    def _activation(self, a: int) -> int:
        return self.add("activation", a, self.r.choice(list(ACTIVATIONS)))

    def _move(self, a: int) -> int | None:
        v, name = self.values[a], self.r.choice(list(MOVES))
        if min(v.shape) < 2 or v.dim() < 3 and name in ("select", "rows of channels"):
            return None
        return self.add("move", a, name)

    def _integers(self, a: int) -> int | None:
        """Moves of integers, and real numbers of these."""
        if self.is_float:
            return None
        scale = self.scale_for(a)
        if scale.form == "channel":
            return None
        kept = self.add("quantize", a, part=scale)
        self.scales[kept] = scale
        v = self.values[kept]
        if min(v.shape) >= 2 and self.r.random() < 0.7:
            name = self.r.choice([n for n in MOVES if v.dim() > 2 or n not in ("select", "rows of channels")])
            kept = self.add("move", kept, name)
            self.scales[kept] = scale
        return self.real(kept)

    def _pad(self, a: int) -> int | None:
        names = list(PADS) if self.values[a].dim() > 2 else ["zeros", "a number"]
        return self.add("pad", a, self.r.choice(names))

    def _binary(self, a: int) -> int:
        b = self.of(lambda v: v.shape == self.values[a].shape)
        assert b is not None
        if self.r.random() < 0.6:
            b = self.through(b)
        return self.add("binary", a, b, self.r.randrange(len(BINARY)))

    def _concat(self, a: int) -> int:
        v = self.values[a]
        dim = self.r.choice(range(1, v.dim()))
        shape = [n for d, n in enumerate(v.shape) if d != dim]
        b = self.of(lambda o: o.dim() == v.dim() and [n for d, n in enumerate(o.shape) if d != dim] == shape)
        assert b is not None
        step = self.steps[a - 1] if a else ("",)
        if step[0] == "dequantize" and self.r.random() < 0.5:  # equal scales
            scale = self.parts[a - 1]
            assert isinstance(scale, Scale)
            if scale.form != "channel" and scale.out_dtype is None:
                b = self.through(b, scale)
        elif self.r.random() < 0.7:
            b = self.through(b)
        pieces = [a, b] if self.r.random() < 0.7 else [b, a, b]
        return self.add("concat", pieces[0], self.r.choice((dim, dim - v.dim())), *pieces[1:])

    def _mean(self, a: int) -> int | None:
        v = self.values[a]
        if v.dim() < 3:
            return None
        dims = self.r.choice(([-1], [1], list(range(2, v.dim())), [-2, -1]))
        if len(dims) >= v.dim() - 1:
            return None
        return self.add("mean", a, dims, self.r.random() < 0.5 or v.dim() - len(dims) < 2)

    def _broadcast(self, a: int) -> int:
        return self.add("broadcast", a, list(range(2, self.values[a].dim())))

    def _norm(self, a: int) -> int | None:
        v = self.values[a]
        if v.dim() == 3 and self.r.random() < 0.5 and v.shape[-1] > 3:
            norm = nn.LayerNorm(v.shape[-1])
        elif v.dim() > 2 and not self.is_float:
            norm = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[v.dim()](v.shape[1])
            norm.running_var.copy_(torch.linspace(0.5, 1.5, v.shape[1]))
        else:
            return None
        norm.weight.data.copy_(torch.linspace(-0.5, 1.5, v.shape[-1 if isinstance(norm, nn.LayerNorm) else 1]))
        norm.bias.data.copy_(torch.linspace(-0.5, 0.5, norm.bias.numel()))
        return self.add("norm", a, part=norm.eval())

    def _max(self, a: int) -> int | None:
        if min(self.values[a].shape[2:]) < 3:
            return None
        options = ((2,), (3, 1, 1), (3, 2, 1), (2, 2, 0, 1, True), (2, 1, 0), (2, 1, 1, 1, True))
        return self.add("pool", a, MAX_POOLS[self.values[a].dim() - 2], *self.r.choice(options))

    def _average(self, a: int) -> int | None:
        if min(self.values[a].shape[2:]) < 3:
            return None
        options = ((2,), (3, 1, 1), (3, 2, 1, False, False), (2, 2, 0, True), (3, 2, 1, True, False), (2, 1, 1, True))
        return self.add("pool", a, AVG_POOLS[self.values[a].dim() - 2], *self.r.choice(options))

    def _adaptive(self, a: int) -> int | None:
        if self.values[a].dim() == 5 and min(self.values[a].shape[2:]) < 2:
            return None
        return self.add("pool", a, ADAPTIVE[self.values[a].dim() - 2], self.r.choice((1, 1, 1, 2, 3)))

    def _linear(self, a: int) -> int:
        r, width = self.r, self.values[a].shape[-1]
        out = r.choice((1, 4, 8, 16, 17, 32))
        return self.add("linear", a, part=self._weight((out, width), out))

    def _weight(self, shape: tuple[int, ...], outputs: int, transposed: bool = False) -> Weight:
        form = "real" if self.is_float else self.r.choice(WEIGHTS)
        if transposed and form == "groups":
            form = "axis 1"
        return Weight(self.r, shape, outputs, form, self.r.random() < 0.7)

    def _dynamic(self, a: int) -> int:
        r = self.r
        if not self.is_float:
            a = self.add("dynamic", a, r.choice(CHOICES))
        return self._linear(a)

    def _product(self, a: int) -> int | None:
        v = self.values[a]
        b = self.of(lambda o: o.dim() == 3 and o.shape[-1] == v.shape[-1] and o.shape[0] == v.shape[0])
        assert b is not None
        return self.add("product", a, self.through(b) if self.r.random() < 0.8 else b)

    def _attention(self, a: int) -> int:
        v = self.values[a]
        b = self.of(lambda o: o.dim() == 3 and o.shape[-1] == v.shape[-1])
        assert b is not None
        if self.r.random() < 0.8:
            b = self.through(b)
        c = b if self.r.random() < 0.4 else self.of(lambda o: o.dim() == 3 and o.shape[1] == self.values[b].shape[1])
        assert c is not None
        if self.r.random() < 0.8 and c != b:
            c = self.through(c)
        r = self.r
        shares = Scale("float", 1 / 255, 0, torch.uint8, (0, 255)) if r.random() < 0.6 and not self.is_float else None
        return self.add("attention", a, b, c, part=shares)

    def _convolution(self, a: int) -> int | None:
        r, v = self.r, self.values[a]
        c, spatial = v.shape[1], v.dim() - 2
        groups = r.choice((1, 1, 1, c, 2 if c % 2 == 0 else 1, 4 if c % 4 == 0 else 1))
        out = r.choice((4, 8, 16, 17 if groups == 1 else 16, 32))
        if groups > 1:
            out = groups * r.choice((1, 1, 2) if groups == c else (1, 2, 4))
        kernel = [r.choice((1, 1, 2, 3, 3, 5 if spatial < 3 else 3)) for _ in range(spatial)]
        if r.random() < 0.7:
            kernel = [kernel[0]] * spatial
        options: dict[str, Any] = {
            "stride": r.choice((1, 1, 1, 2)),
            "padding": r.choice((0, kernel[0] // 2)),
            "dilation": r.choice((1, 1, 1, 2)),
            "groups": groups,
        }
        if any(
            n + 2 * options["padding"] <= (k - 1) * options["dilation"]
            for n, k in zip(v.shape[2:], kernel, strict=True)
        ):
            return None
        shape: tuple[int, ...] = (out, c // groups, *kernel)
        function = CONVOLUTIONS[spatial]
        if is_transposed := r.random() < 0.12:
            shape = (c, out // groups, *kernel)
            function = TRANSPOSED[spatial]
            if max(v.shape[2:]) > 9:
                return None
        weight = self._weight(shape, out, is_transposed) if not is_transposed else self._transposed(shape, out)
        return self.add("convolution", a, function, options, part=weight)

    def _transposed(self, shape: tuple[int, ...], out: int) -> Weight:
        weight = self._weight(shape, shape[0], True)
        if weight.bias is not None:
            weight.bias = nn.Parameter(torch.linspace(-0.3, 0.3, out))
        return weight


def random_network(r: random.Random, is_float: bool = False) -> tuple[QuantizedSteps, Tensor]:
    """A network of one to eight layers, and an input."""
    shape = r.choice(
        (
            (r.choice((1, 2)), r.choice((3, 8, 16, 17)), r.choice((5, 8)), r.choice((5, 7))),
            (r.choice((1, 2)), r.choice((4, 16)), r.choice((6, 9))),
            (r.choice((1, 3)), r.choice((5, 8)), r.choice((8, 16, 24))),
            (r.choice((2, 5)), r.choice((8, 24, 33))),
            (r.choice((1, 2)), r.choice((3, 8)), 4, 5, 4),
            (2, r.choice((3, 8, 16)), 7, 6),
        )
    )
    x = torch.randn(shape, generator=torch.Generator().manual_seed(r.randrange(1 << 30)))
    if r.random() < 0.2:
        x = (x * 16).round() / 16  # midway between integers, often
    draft = Draft(r, x, is_float)
    if r.random() < 0.7:
        draft.through(0)
    for _ in range(r.randint(1, 8)):
        draft.grow()
        if draft.values[-1].numel() > 20_000 or draft.values[-1].numel() == 0:
            break
    count = len(draft.values) - 1
    chosen = [r.randint(1, count) for _ in range(r.choice((0, 0, 1, 2)))] + [count] if count else [0]
    return QuantizedSteps(draft.steps, draft.parts, list(dict.fromkeys(chosen))).eval(), x
