"""Random networks over sequences [N, L, C] equal eager, by every entry: products, attention, normalizations, masks,
views, writes in place, and values that several steps read."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zendnn_cffi
from tests.support.lowering import noise, oracle, tensors
from tests.support.random_networks import SLOW, Steps
from tests.tolerance import tolerance

WIDTHS = (4, 8, 16, 24)
LENGTHS = (4, 6, 8)
Module = nn.Module | None


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[N, L, C] to [N, heads, L, C / heads]."""
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def written_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax of products of heads, as models write it out."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ v


def attend(m: Any, x: Tensor, y: Tensor, kind: str, heads: int) -> Tensor:
    """x asks y, both [N, *, C]."""
    q, k, v = split_heads(m[0](x), heads), split_heads(m[1](y), heads), split_heads(m[2](y), heads)
    mask = None
    if "mask" in kind:
        mask = torch.linspace(-1.0, 0.5, k.shape[2], dtype=x.dtype).view(1, -1)
    if kind.startswith("written"):
        mixed = written_attention(q, k, v, mask)
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal="causal" in kind)
    return mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)


def in_place(x: Tensor, kind: int) -> Tensor:
    """Steps that write to a value of their own."""
    y = x.clone() if kind % 2 else x * 1.0
    if kind < 2:
        y[:, 0] = 0.5
        y.mul_(0.5).add_(0.25)
    elif kind < 4:
        y += x
        view = y[:, :, 1:]
        view.sub_(0.25)
    else:
        y.transpose(1, 2).relu_()
        y[..., -1].copy_(x[..., 0])
    return y


def written_norm(x: Tensor, kind: int) -> Tensor:
    """Normalizations of rows as models write them out."""
    if kind == 0:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    if kind == 1:
        centered = x - x.mean(-1, keepdim=True)
        return centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5)
    if kind == 2:
        return F.normalize(x + 2.0, dim=-1)
    variance, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return (x - mean) * (variance + 1e-5).rsqrt()


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu written": lambda x: x * torch.sigmoid(x),
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "clamp": lambda x: x.clamp(-0.5, 1.0),
    "abs": lambda x: x.abs() + 0.1,
    "scale": lambda x: 0.5 * x + 0.25,
    "one minus": lambda x: 1 - x,
    "softmax -1": lambda x: x.softmax(-1),
    "softmax 1": lambda x: F.softmax(x, dim=1),
    "log_softmax": lambda x: 0.3 * x.log_softmax(-1),
    "where": lambda x: torch.where(x > 0.1, x, x * 0.1),
    "masked_fill": lambda x: x.masked_fill(x < -0.2, 0.0),
    "cumsum": lambda x: x.cumsum(1) * 0.5,
    "roll": lambda x: torch.roll(x, 1, 1),
    "flip": lambda x: x.flip(2),
    "contiguous": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
    "norm rms": lambda x: written_norm(x, 0),
    "norm layer": lambda x: written_norm(x, 1),
    "norm l2": lambda x: written_norm(x, 2),
    "norm var_mean": lambda x: written_norm(x, 3),
    "in place 0": lambda x: in_place(x, 0),
    "in place 1": lambda x: in_place(x, 1),
    "in place 2": lambda x: in_place(x, 2),
    "in place 3": lambda x: in_place(x, 3),
    "in place 4": lambda x: in_place(x, 4),
    "minus mean": lambda x: x - x.mean(1, keepdim=True),
    "times maximum": lambda x: x * x.amax(-1, keepdim=True),
    "split and back": lambda x: split_heads(x, 2).transpose(1, 2).flatten(2),
    "through rows": lambda x: x.reshape(-1, x.shape[-1]).view(x.shape),
    "expand": lambda x: x + x[:, :1].expand(-1, x.shape[1], -1),
    "stack": lambda x: torch.stack((x, x * 0.5), 1).sum(1),
    "dropout": lambda x: F.dropout(x, 0.5, False),
    "double": lambda x: x.double().to(x.dtype),
    "detach": lambda x: x.detach() + 0.0,
    "index": lambda x: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
    "gate": lambda x: x * torch.sigmoid(x.mean(2, keepdim=True)),
}
BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    lambda a, b: a / (b.abs() + 1),
    lambda a, b: torch.add(a, b, alpha=0.5),
    lambda a, b: a + b[:, :1],
    lambda a, b: a * b[..., -1:],
    lambda a, b: torch.lerp(a, b, 0.25),
    lambda a, b: torch.addcmul(a, a, b, value=0.5),
)
ATTENTION = ("sdpa", "sdpa causal", "sdpa mask", "written", "written mask")


class Sequences(Steps):
    """Values [N, A, B]."""

    def step(self, kind: str, rest: list[Any], module: Any, values: list[Tensor]) -> Tensor:
        """One value more."""
        a = values[rest[0]]
        match kind:
            case "module":
                return module(a)
            case "unary":
                return UNARY[rest[1]](a)
            case "binary":
                return BINARY[rest[2]](a, values[rest[1]])
            case "attention":
                return attend(module, a, values[rest[1]], rest[2], rest[3])
            case "product":
                return a @ values[rest[1]].transpose(1, 2) * 0.3
            case "matmul":
                return torch.bmm(a, values[rest[1]]) * 0.3
            case "concat":
                return torch.cat([a, values[rest[1]]], rest[2])
            case "chunk":
                return a.chunk(2, rest[2])[rest[1]]
            case "narrow":
                return a[:, :, rest[1] : rest[2]]
            case "transpose":
                return a.transpose(1, 2)
            case "gated":
                gate, value = a.chunk(2, -1)
                return F.silu(gate) * value
            case "every other":
                return a[:, ::2]
        raise AssertionError(kind)


def smooth(module: nn.Module) -> nn.Module:
    """Weights that keep values near one, so that errors do not grow."""
    for number, (name, p) in enumerate(module.named_parameters()):
        if p.ndim > 1:
            p.data = noise(*p.shape, seed=number) / max(p[0].numel(), 1) ** 0.5
        else:
            p.data = noise(*p.shape, seed=number) * 0.1 + (1.0 if name.endswith("weight") else 0.0)
    return module


class Projections(nn.ModuleList):
    """Linear layers of one attention."""


@st.composite
def networks(draw: st.DrawFn) -> tuple[Steps, Tensor]:
    """A network of two to ten steps, and an input."""
    length, width = draw(st.sampled_from(LENGTHS)), draw(st.sampled_from(WIDTHS))
    shapes = [(length, width)]
    steps: list[tuple[Any, ...]] = []
    modules: list[Module] = []
    for _ in range(draw(st.integers(2, 10))):
        a = draw(st.one_of(st.just(len(shapes) - 1), st.integers(0, len(shapes) - 1)))
        step, module, shape = draw(one_step(shapes, a))
        if max(shape) > 48 or min(shape) < 2:
            continue
        steps.append(step)
        modules.append(None if module is None else smooth(module))
        shapes.append(shape)
    count = len(shapes) - 1
    outputs = draw(st.lists(st.integers(1, count), max_size=2)) + [count] if count else [0]
    return Sequences(steps, modules, outputs).eval(), noise(draw(st.sampled_from((1, 2, 3))), length, width)


Step = tuple[tuple[Any, ...], Module, tuple[int, int]]  # with its module, and the shape of what it makes
OF_ONE = ("linear", "linear", "linear", "unary", "unary", "unary", "norm", "narrow", "transpose", "conv", "every other")
OF_TWO = ("binary", "binary", "concat", "product", "matmul")


@st.composite
def one_step(draw: st.DrawFn, shapes: list[tuple[int, int]], a: int) -> Step:
    """A step over the value a."""
    n, c = shapes[a]
    kind = draw(
        st.sampled_from((*OF_ONE, *OF_TWO, *(("attention", "attention", "chunk", "gated") if c % 4 == 0 else ())))
    )
    if kind in OF_TWO or kind == "attention":
        return draw(step_of_two(kind, shapes, a))
    match kind:
        case "linear":
            out = draw(st.sampled_from(WIDTHS))
            return ("module", a), nn.Linear(c, out, bias=draw(st.booleans())), (n, out)
        case "conv":
            out = draw(st.sampled_from(WIDTHS))
            return ("module", a), nn.Conv1d(n, out, 3, padding=1), (out, c)
        case "unary":
            name = draw(st.sampled_from(sorted(UNARY)))
            return ("unary", a, "relu" if name == "split and back" and c % 2 else name), None, (n, c)
        case "norm":
            norms = nn.LayerNorm(c), nn.RMSNorm(c, eps=1e-5), nn.LayerNorm(c, elementwise_affine=False)
            return ("module", a), draw(st.sampled_from(norms)), (n, c)
        case "narrow":
            start = draw(st.integers(0, c - 1))
            stop = draw(st.integers(start + 1, c))
            return ("narrow", a, start, stop), None, (n, stop - start)
        case "transpose":
            return ("transpose", a), None, (c, n)
        case "every other":
            return ("every other", a), None, ((n + 1) // 2, c)
        case "chunk":
            dim = 2 if n % 2 else draw(st.sampled_from((1, 2, -1)))
            return ("chunk", a, draw(st.integers(0, 1)), dim), None, (n // 2, c) if dim == 1 else (n, c // 2)
    return ("gated", a), None, (n, c // 2)


@st.composite
def step_of_two(draw: st.DrawFn, kind: str, shapes: list[tuple[int, int]], a: int) -> Step:
    """A step over the value a and another one that fits, which may be a itself."""
    n, c = shapes[a]

    def other(fits: Callable[[tuple[int, int]], bool]) -> int:
        return draw(st.sampled_from([i for i, shape in enumerate(shapes) if fits(shape)]))

    match kind:
        case "binary":
            return ("binary", a, other(lambda s: s == (n, c)), draw(st.integers(0, len(BINARY) - 1))), None, (n, c)
        case "concat":
            dim = draw(st.sampled_from((1, 2, -1)))
            if dim == 1:
                b = other(lambda s: s[1] == c)
                return ("concat", a, b, dim), None, (n + shapes[b][0], c)
            b = other(lambda s: s[0] == n)
            return ("concat", a, b, dim), None, (n, c + shapes[b][1])
        case "product":
            b = other(lambda s: s[1] == c)
            return ("product", a, b), None, (n, shapes[b][0])
        case "matmul":
            if all(shape[0] != c for shape in shapes):
                return ("transpose", a), None, (c, n)
            b = other(lambda s: s[0] == c)
            return ("matmul", a, b), None, (n, shapes[b][1])
    how, heads = draw(st.sampled_from(ATTENTION)), draw(st.sampled_from((1, 2, 4)))
    b = a if "causal" in how else other(lambda s: s[1] == c)
    return ("attention", a, b, how, heads), Projections([nn.Linear(c, c) for _ in range(3)]), (n, c)


def check(model: Steps, optimized: Any, x: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Results as near to float64 as eager's are, or near for their size; the input is as it was."""
    before = x.clone()
    with torch.no_grad():
        ours, again, eager = tensors(optimized(x)), tensors(optimized(x)), tensors(model(x))
    assert torch.equal(x, before), "the input was changed"
    for mine, second, theirs, expected in zip(ours, again, eager, oracle(model, (x,)), strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert torch.equal(mine, second), "two calls differ"
        error, of_eager = (mine - expected).abs().max().item(), (theirs - expected).abs().max().item()
        size = max(1.0, expected.abs().max().item())
        allowed = max(30 * of_eager, 30 * len(model.steps) * tolerance(dtype) * size)
        assert error <= allowed, f"error {error:.3g}, of eager {of_eager:.3g}, allowed {allowed:.3g}, size {size:.3g}"


def strided(x: Tensor) -> Tensor:
    """The same numbers, not contiguous."""
    return x.transpose(0, 2).contiguous().transpose(0, 2)


@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(drawn=networks(), exported=st.booleans())
def test_random_networks_equal_eager(drawn: tuple[Steps, Tensor], exported: bool) -> None:
    model, x = drawn
    gm = zendnn_cffi.optimize(model, x if exported else None, tune="off")
    other = noise(5, *x.shape[1:])
    for given_x in (x, other, strided(other)):
        check(model, gm, given_x)


@settings(max_examples=15, deadline=None, suppress_health_check=SLOW)
@given(drawn=networks(), exported=st.booleans())
def test_random_networks_in_bfloat16(drawn: tuple[Steps, Tensor], exported: bool) -> None:
    model, x = drawn
    gm = zendnn_cffi.optimize(model, x if exported else None, tune="off", dtype=torch.bfloat16)
    check(model, gm, x, torch.bfloat16)


@settings(max_examples=4, deadline=None, suppress_health_check=SLOW)
@given(drawn=networks())
def test_random_networks_by_torch_compile(drawn: tuple[Steps, Tensor]) -> None:
    model, x = drawn
    torch._dynamo.reset()
    check(model, torch.compile(copy.deepcopy(model), backend="zendnn", options={"tune": "off"}), x)


@pytest.mark.parametrize("name", sorted(UNARY))
def test_each_step_between_linears(name: str) -> None:
    """Every step once for certain, between products that are offloaded."""
    parts = [smooth(nn.Linear(8, 16)), None, smooth(nn.Linear(16, 8))]
    model = Sequences([("module", 0), ("unary", 1, name), ("module", 2)], parts, [3, 2]).eval()
    gm = zendnn_cffi.optimize(model, tune="off")
    check(model, gm, noise(2, 6, 8))
    assert sum(kind == "inner_product" for kind, _ in zendnn_cffi.explain(gm).counts().elements()) == 2
