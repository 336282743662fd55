"""Random chains of post-ops, and what they make of a result in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from tests.zendnn_cffi.functional.fuzzing.holding import Holder, as_tensor

Function = Callable[[torch.Tensor], torch.Tensor]


def _clip(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
    return x.clamp_min(a).clamp_max(b)


# kind -> x, alpha, beta in float64
ELTWISE: dict[str, Callable[[torch.Tensor, float, float], torch.Tensor]] = {
    "relu": lambda x, a, b: torch.where(x > 0, x, a * x),
    "pow": lambda x, a, b: a * x**b,
    "tanh": lambda x, a, b: x.tanh(),
    "gelu_erf": lambda x, a, b: F.gelu(x),
    "elu": lambda x, a, b: torch.where(x > 0, x, a * x.expm1()),
    "round": lambda x, a, b: x.round(),
    "square": lambda x, a, b: x * x,
    "logsigmoid": lambda x, a, b: F.logsigmoid(x),
    "abs": lambda x, a, b: x.abs(),
    "mish": lambda x, a, b: F.mish(x),
    "sqrt": lambda x, a, b: x.sqrt(),
    "hardswish": lambda x, a, b: F.hardswish(x),
    "linear": lambda x, a, b: a * x + b,
    "bounded_relu": lambda x, a, b: _clip(x, 0, a),
    "soft_relu": lambda x, a, b: torch.where(x > 30, x, x.exp().log1p()),
    "logistic": lambda x, a, b: x.sigmoid(),
    "exp": lambda x, a, b: x.exp(),
    "gelu_tanh": lambda x, a, b: F.gelu(x, approximate="tanh"),
    "swish": lambda x, a, b: x * (a * x).sigmoid(),
    "log": lambda x, a, b: x.log(),
    "clip": _clip,
    "clip_v2": _clip,
    "hardsigmoid": lambda x, a, b: F.hardsigmoid(x),
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "max": torch.maximum,
    "min": torch.minimum,
    "ge": lambda x, y: (x >= y).double(),
    "gt": lambda x, y: (x > y).double(),
    "le": lambda x, y: (x <= y).double(),
    "lt": lambda x, y: (x < y).double(),
    "eq": lambda x, y: (x == y).double(),
    "ne": lambda x, y: (x != y).double(),
}
ARITHMETIC = ("add", "sub", "mul", "max", "min", "div")


def numbers(h: Holder, kind: str) -> tuple[float, float]:
    """Alpha and beta that make sense for a kind."""
    if kind in ("clip", "clip_v2"):
        low = h.r.choice([-1.0, 0.0, 0.25])
        return low, low + h.r.choice([0.0, 0.5, 6.0])
    if kind == "bounded_relu":
        return h.r.choice([0.5, 6.0]), 0.0
    if kind == "pow":
        return h.r.choice([1.0, -0.5]), h.r.choice([1.0, 2.0, 0.5, 3.0])
    if kind == "linear":
        return h.r.choice([1.0, -0.5, 0.0]), h.r.choice([0.0, 1.5])
    if kind in ("relu", "elu", "swish"):
        return h.r.choice([0.0, 0.1, 1.0, -0.3] if kind == "relu" else [1.0, 0.5, 1.7]), 0.0
    return 0.0, 0.0


@dataclass
class Chain:
    """Post-ops as tuples, and the same as one function of (result, what out held) in float64."""

    tuples: list[tuple[Any, ...]] = field(default_factory=list)
    steps: list[Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]] = field(default_factory=list)

    @property
    def reads_out(self) -> bool:
        return any(entry[0] == "sum" for entry in self.tuples)

    def apply(self, x: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        for step in self.steps:
            x = step(x, before)
        return x

    def append(self, entry: tuple[Any, ...], step: Any) -> None:
        self.tuples.append(entry)
        self.steps.append(step)


def chain(h: Holder, shape: Sequence[int], *, prelu: bool = True) -> Chain:
    """Return up to four post-ops for a result of this shape; kinds may come more than once."""
    made = Chain()
    for _ in range(h.r.choice([0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4])):
        kind = h.r.random()
        if kind < 0.45:
            _add_eltwise(h, made)
        elif kind < 0.8:
            _add_binary(h, made, shape)
        elif kind < 0.9 and prelu:
            channels = shape[1] if len(shape) > 1 else 1
            weight = h.operand([h.r.choice([1, channels])], torch.float32)
            w = as_tensor(weight).double().clone()
            w = w.reshape([w.numel() if i == 1 else 1 for i in range(len(shape))]) if w.numel() > 1 else w
            made.append(("prelu", weight), lambda x, out, w=w: torch.where(x > 0, x, w * x))
        else:
            scale = h.r.choice([1.0, 0.5, -2.0])
            entry = ("sum", scale) if scale != 1.0 or h.chance(0.5) else ("sum",)
            made.append(entry, lambda x, out, s=scale: x + s * out)
    return made


def _add_eltwise(h: Holder, made: Chain) -> None:
    kind = h.r.choice(["relu", "relu", *ELTWISE])
    alpha, beta = numbers(h, kind)
    scale = h.r.choice([1.0, 1.0, 1.0, 0.5])
    function = ELTWISE[kind]
    made.append(
        ("eltwise", kind, alpha, beta, scale), lambda x, out, f=function, a=alpha, b=beta, s=scale: s * f(x, a, b)
    )


def _add_binary(h: Holder, made: Chain, shape: Sequence[int]) -> None:
    kind = h.r.choice([*ARITHMETIC, *BINARY])
    if h.chance(0.15):
        number = h.r.choice([2.0, -0.5, 1])
        other: Any = number
        value = torch.tensor(float(number), dtype=torch.float64)
    else:
        dims = [n if h.chance(0.6) else 1 for n in shape]
        while dims and dims[0] == 1 and h.chance(0.5):
            dims = dims[1:]
        other = h.operand(dims, h.r.choice([h.dtype, torch.float32]), positive=kind == "div")
        value = as_tensor(other).double().clone()
    made.append(("binary", kind, other), lambda x, out, f=BINARY[kind], v=value: f(x, v).reshape(x.shape))


def allowed(
    made: Chain, base: torch.Tensor, before: torch.Tensor | None, relative: float, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the result in float64, the error that a computation in less precision may have, per element).

    relative  error of the base, of each step, and of the rounded result
    scale     what the base's error is relative to
    """
    expected = made.apply(base, before)
    error = torch.full_like(base, relative * scale)
    x = base
    for entry, step in zip(made.tuples, made.steps, strict=True):
        after = step(x, before)  # each step's error is what it makes of the error so far, and its own
        around = [(step(x + sign * error, before) - after).abs() for sign in (-1, 1, 0.5, -0.5)]
        if entry[:2] in (("binary", "eq"), ("binary", "ne")):  # jumps at one point, which may be near
            around.append(torch.ones_like(x))
        error = torch.stack(around).amax(0) + relative * after.abs() + 1e-5
        # See docs: NaN is not kept everywhere. Steps compute in float32, where exp(200) times 0 is NaN.
        error = torch.where(x.isfinite() & after.float().isfinite(), error, torch.inf)
        x = after
    return expected, error + relative * expected.abs() + 1e-30 * math.pi
