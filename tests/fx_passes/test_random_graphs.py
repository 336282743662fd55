"""Random convolutional networks equal eager, whatever shares, overwrites, slices or concatenates what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.lowering import noise, offload
from tests.support.random_networks import SLOW, Steps

WIDTHS = (3, 16, 17, 32)
ACTIVATIONS = (F.relu, F.silu, F.hardswish, torch.sigmoid, torch.tanh, F.gelu, lambda x: F.leaky_relu(x, 0.1), F.relu6)
BINARY = (torch.add, torch.mul, torch.sub, torch.maximum)
VIEWS = (
    lambda x: x[:, :1],
    lambda x: x[:1],
    lambda x: x[:, :, :1],
    lambda x: x[..., -1:],
    lambda x: x.transpose(2, 3),
    lambda x: x.mean((2, 3), keepdim=True),
    lambda x: x.amax(1, keepdim=True),
    lambda x: x.flip(1),
)


class RandomNet(Steps):
    """Values [N, C, H, W]."""

    def step(self, kind: str, rest: list[Any], module: nn.Module, values: list[torch.Tensor]) -> torch.Tensor:
        a = values[rest[0]]
        match kind:
            case "module":
                return module(a)
            case "activation":
                return ACTIVATIONS[rest[1]](a)
            case "binary":
                return BINARY[rest[2]](a, values[rest[1]])
            case "with a view":
                return BINARY[rest[2]](a, VIEWS[rest[1]](a))
            case "concat":
                return torch.cat([values[i] for i in rest[0:]], 1)
            case "chunk":
                return a.chunk(2, 1)[rest[1]]
            case "narrow":
                return a[:, rest[1] : rest[2]]
            case "shuffle":
                n, c, h, w = a.size()
                return a.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
            case "gate":
                return a * torch.sigmoid(module(F.adaptive_avg_pool2d(a, 1)))
            case "scale":
                return a * rest[1] + rest[2]
        raise AssertionError(kind)

    def finish(self, value: torch.Tensor, number: int) -> torch.Tensor:
        return (value, value.flatten(1), value.mean((2, 3)), value.permute(0, 2, 3, 1))[number % 4]


def smooth(module: nn.Module) -> nn.Module:
    """Weights that keep values near one, so that errors do not grow."""
    for name, p in module.named_parameters():
        fan = max(p[0].numel(), 1) if p.ndim > 1 else 1
        p.data = noise(*p.shape, seed=len(name)) * ((1.5 / fan) ** 0.5 if p.ndim > 1 else 0.1)
    return module


@st.composite
def networks(draw: st.DrawFn) -> tuple[RandomNet, torch.Tensor]:
    """A network of three to twelve steps, and an input."""
    size, first = draw(st.sampled_from((5, 8))), draw(st.sampled_from(WIDTHS))
    shapes = [(first, size)]
    steps: list[tuple[Any, ...]] = []
    modules: list[nn.Module | None] = []
    for _ in range(draw(st.integers(3, 12))):
        # the last values most of the time, so that the network is deep; any value else
        a = draw(st.one_of(st.just(len(shapes) - 1), st.integers(0, len(shapes) - 1)))
        c, n = shapes[a]
        kinds = ["conv"] * 3 + ["activation", "binary", "concat", "pool", "norm", "gate", "scale", "with a view"]
        kinds += ["chunk", "shuffle", "narrow"] if c % 2 == 0 else []
        kind = draw(st.sampled_from(kinds))
        module: nn.Module | None = None
        if kind == "conv":
            o, k, s = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from((1, 3))), draw(st.sampled_from((1, 1, 2)))
            groups = c if draw(st.integers(0, 4)) == 0 else 1
            module = nn.Conv2d(c, c if groups > 1 else o, k, s, k // 2, groups=groups, bias=draw(st.booleans()))
            step, shape = ("module", a), (c if groups > 1 else o, (n - 1) // s + 1)
        elif kind == "pool":
            pools = (nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(1, 2))
            number = draw(st.integers(0, 3))
            module, step, shape = pools[number], ("module", a), (c, n if number < 2 else (n - 1) // 2 + 1)
        elif kind == "norm":
            module, step, shape = nn.BatchNorm2d(c).eval(), ("module", a), (c, n)
        elif kind == "gate":
            module, step, shape = nn.Conv2d(c, c, 1), ("gate", a), (c, n)
        elif kind == "activation":
            step, shape = ("activation", a, draw(st.integers(0, len(ACTIVATIONS) - 1))), (c, n)
        elif kind == "binary":
            b = draw(st.sampled_from([i for i, s in enumerate(shapes) if s == (c, n)]))
            step, shape = ("binary", a, b, draw(st.sampled_from((0, 0, 0, 1, 2, 3)))), (c, n)
        elif kind == "with a view":
            step = ("with a view", a, draw(st.integers(0, len(VIEWS) - 1)), draw(st.integers(0, 3)))
            shape = (c, n)
        elif kind == "concat":
            others = draw(
                st.lists(st.sampled_from([i for i, s in enumerate(shapes) if s[1] == n]), min_size=1, max_size=2)
            )
            step, shape = ("concat", a, *others), (c + sum(shapes[i][0] for i in others), n)
        elif kind == "narrow":
            start = draw(st.integers(0, c - 1))
            stop = draw(st.integers(start + 1, c))
            step, shape = ("narrow", a, start, stop), (stop - start, n)
        elif kind == "chunk":
            step, shape = ("chunk", a, draw(st.integers(0, 1))), (c // 2, n)
        elif kind == "shuffle":
            step, shape = ("shuffle", a), (c, n)
        else:
            step, shape = ("scale", a, 0.5, draw(st.sampled_from((0.0, 0.25)))), (c, n)
        if shape[0] > 96:
            continue
        steps.append(step)
        modules.append(None if module is None else smooth(module))
        shapes.append(shape)
    count = len(shapes) - 1
    outputs = draw(st.lists(st.integers(1, count), max_size=2)) + [count] if count else [0]
    return RandomNet(steps, modules, outputs).eval(), noise(draw(st.sampled_from((1, 2))), first, size, size)


def check(drawn: tuple[RandomNet, torch.Tensor], dtype: torch.dtype | None = None, **options: Any) -> None:
    model, x = drawn
    with torch.no_grad():
        results = model(x)
    largest = max(t.abs().max().item() for t in ([results] if isinstance(results, torch.Tensor) else results))
    depth = 1 + len(model.steps)
    size = max(1.0, largest) * (
        1.0 if dtype is None else max(1.0, depth / 3)
    )  # each value is rounded, and the next of it
    offload(model, x, dtype=dtype, k=300 * depth, scale=size, **options)


@settings(max_examples=30, deadline=None, suppress_health_check=SLOW)
@given(networks())
def test_random_networks_equal_eager(drawn: tuple[RandomNet, torch.Tensor]) -> None:
    check(drawn)


@settings(max_examples=12, deadline=None, suppress_health_check=SLOW)
@given(networks())
def test_random_networks_in_bfloat16(drawn: tuple[RandomNet, torch.Tensor]) -> None:
    check(drawn, torch.bfloat16)


@pytest.mark.parametrize("mode", ("full",))
@settings(max_examples=3, deadline=None, suppress_health_check=SLOW)
@given(drawn=networks())
def test_random_networks_with_measured_choices(mode: str, drawn: tuple[RandomNet, torch.Tensor]) -> None:
    check(drawn, tune=mode)
