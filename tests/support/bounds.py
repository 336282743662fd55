"""Between which numbers each result of a quantized network may lie, whatever order sums are taken in.

A number midway between two integers may become either, and one step of a layer becomes many numbers of the next. So
each value is an interval: what rounding may make of it. Where no number is near the middle, integers have one value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

SLACK = {torch.float32: 4e-6, torch.float64: 4e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)


@dataclass
class Range:
    """All numbers from low to high, float64, element by element; dtype is the value's own."""

    low: Tensor
    high: Tensor
    dtype: torch.dtype

    @property
    def middle(self) -> Tensor:
        return (self.low + self.high) / 2

    @property
    def radius(self) -> Tensor:
        return (self.high - self.low) / 2


def bounds(model: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> list[Range]:
    """Of each result of model(x), which torch.export follows; dtype is that of what may be rounded inside."""
    graph = model if isinstance(model, fx.GraphModule) else torch.export.export(model, (x,)).module()
    with torch.no_grad():
        result = _Bounds(graph, dtype).run(Range(x.double(), x.double(), x.dtype))
    return [_range(part) for part in pytree.tree_leaves(result, is_leaf=lambda part: isinstance(part, Range))]


def _range(value: Any) -> Range:
    return value if isinstance(value, Range) else Range(value.double(), value.double(), value.dtype)


class _Bounds(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, dtype: torch.dtype | None) -> None:
        super().__init__(graph, garbage_collect_values=True)
        self.least = SLACK[dtype or torch.float32]

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op == "call_module" or not any(isinstance(a, Range) for a in _flat((args, kwargs))):
            return None if n.op == "call_module" else super().run_node(n)
        if n.op == "output":
            return args[0]
        name = str(n.target).split(".")[1] if isinstance(n.target, torch._ops.OpOverload) else n.target.__name__
        value = n.meta.get("val")
        dtype = value.dtype if isinstance(value, Tensor) else torch.float32
        slack = max(self.least, SLACK.get(dtype, 0.0))
        return _RULES[name](_Call(n.target, args, kwargs, dtype, slack))


def _flat(value: Any) -> list[Any]:
    return pytree.tree_leaves(value, is_leaf=lambda part: isinstance(part, Range))


@dataclass
class _Call:
    target: Any
    args: Any
    kwargs: Any
    dtype: torch.dtype
    slack: float

    def at(self, end: str) -> Any:
        """The result for one end of each operand."""

        def pick(part: Any) -> Any:
            return getattr(part, end) if isinstance(part, Range) else part

        args, kwargs = pytree.tree_map(pick, (self.args, self.kwargs), is_leaf=lambda part: isinstance(part, Range))
        return self.target(*args, **kwargs)

    def widened(self, low: Tensor, high: Tensor, size: Tensor | None = None) -> Range:
        """With what rounding of numbers as large as size adds."""
        size = torch.maximum(low.abs(), high.abs()) if size is None else size
        extra = self.slack * size + 1e-30
        return Range(low - extra, high + extra, self.dtype)


def _monotone(call: _Call) -> Any:
    low, high = call.at("low"), call.at("high")
    if isinstance(low, Tensor):
        return call.widened(low, high)
    return [call.widened(a, b) for a, b in zip(low, high, strict=True)]


def _moved(call: _Call) -> Any:
    """Numbers as they are, or some of them."""
    low, high = call.at("low"), call.at("high")
    if isinstance(low, Tensor):
        return Range(low, high, call.dtype)
    dtype = next(part.dtype for part in _flat(call.args) if isinstance(part, Range))
    return [Range(a, b, dtype) for a, b in zip(low, high, strict=True)]


def _sloped(slope: float) -> Callable[[_Call], Any]:
    """A function of numbers whose derivative is at most slope."""

    def rule(call: _Call) -> Range:
        x = call.args[0]
        args = (x.middle, *call.args[1:])
        middle, radius = call.target(*args, **call.kwargs), x.radius * slope
        return call.widened(middle - radius, middle + radius, x.middle.abs() + x.radius)

    return rule


def _product(call: _Call) -> Range:
    """Convolutions, linear layers and matrix products, with a bias or none."""
    a, b, *rest = call.args
    bias = rest[0] if rest and isinstance(rest[0], Tensor) else call.kwargs.get("bias")
    others = rest[1:] if rest and (rest[0] is None or isinstance(rest[0], Tensor)) else rest
    a, b = _range(a), _range(b)

    def product(left: Tensor, right: Tensor, added: Tensor | None) -> Tensor:
        if call.target.__name__.startswith(("linear", "conv")):
            return call.target(left, right, added, *others)
        return call.target(left, right)

    wide = None if bias is None else bias.double()
    middle = product(a.middle, b.middle, wide)
    size = product(a.middle.abs() + a.radius, b.middle.abs() + b.radius, None if wide is None else wide.abs())
    radius = product(a.radius, b.middle.abs() + b.radius, None) + product(a.middle.abs(), b.radius, None)
    return call.widened(middle - radius, middle + radius, size)


def _combined(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[_Call], Range]:
    """A function of two operands, monotone in each."""

    def rule(call: _Call) -> Range:
        a, b = (
            part if isinstance(part, Range) else Range(*(torch.as_tensor(part).double(),) * 2, torch.float32)
            for part in call.args[:2]
        )
        alpha = call.kwargs.get("alpha", 1)
        ends = [function(p, q * alpha) for p in (a.low, a.high) for q in (b.low, b.high)]
        low, high = torch.stack(ends).amin(0), torch.stack(ends).amax(0)
        size = torch.stack(ends).abs().amax(0)
        if function in (torch.add, torch.sub):
            size = size + a.high.abs() + b.high.abs()
        return call.widened(low, high, size)

    return rule


def _batch_norm(call: _Call) -> Range:
    x, *numbers, training, momentum, eps, _ = call.args
    weight, bias, mean, variance = (n.double().view(-1, *(1,) * (x.low.dim() - 2)) for n in numbers)
    slope = weight / (variance + eps).sqrt()
    ends = torch.stack([(end - mean) * slope + bias for end in (x.low, x.high)])
    size = (x.low.abs() + x.high.abs() + mean.abs()) * slope.abs() + bias.abs()
    return call.widened(ends.amin(0), ends.amax(0), size)


def _softmax(call: _Call) -> Range:
    x = call.args[0]
    middle = x.middle.softmax(call.args[1])
    growth = (2 * (x.radius + call.slack * x.middle.abs()).amax(call.args[1], keepdim=True)).clamp(max=50.0).exp()
    return call.widened(middle / growth, (middle * growth).clamp(max=1.0), middle.clamp(min=1e-3))


def _quantize(call: _Call) -> Range:
    x, scale, zero_point, low, high, dtype, unsure = _spread(call)
    x = _range(x)
    slack = max(call.slack, 1e-6)
    ends = (x.low - slack * x.low.abs()) / scale, (x.high + slack * x.high.abs()) / scale
    if "per_token" in call.target.__name__:
        found = [((end + zero_point).round()).clamp(low, high) for end in ends]
    else:
        found = [(end.round() + zero_point).clamp(low, high) for end in ends]
    return Range(found[0], found[1], dtype)


def _dequantize(call: _Call) -> Range:
    x, scale, zero_point, *_, unsure = _spread(call)
    shift = 0 if zero_point is None else zero_point
    low, high = (x.low - shift) * scale, (x.high - shift) * scale
    extra = unsure * scale
    if call.dtype == torch.bfloat16:  # integers and zero points are rounded first
        extra = extra + call.slack * (x.low.abs() + abs(shift)) * scale
    return call.widened(low - extra, high + extra)


def _spread(call: _Call) -> tuple[Any, ...]:
    """src, scale, zero point, low, high, dtype, steps that a scale of the call may be off.

    Scales and zero points broadcast over src.
    """
    schema = call.target._schema.arguments
    given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    given |= {a.name: value for a, value in zip(schema, call.args, strict=False)} | call.kwargs
    x = given["input"]
    shape = x.low.shape
    scale = given.get("scale", given.get("scales"))
    zero_point = given.get("zero_point", given.get("zero_points"))
    dtype = given.get("dtype", given.get("output_dtype", given.get("input_dtype")))
    limits = torch.iinfo(dtype) if dtype in INTEGERS else torch.iinfo(torch.int8)
    low = limits.min if given["quant_min"] is None else given["quant_min"]
    high = limits.max if given["quant_max"] is None else given["quant_max"]

    def along(values: Any) -> Any:
        if isinstance(values, Range):
            values = values.middle
        if not isinstance(values, Tensor):
            return values
        values = values.double()
        if "axis" in given:
            return values.reshape([-1 if dim == given["axis"] % len(shape) else 1 for dim in range(len(shape))])
        if "block_size" in given:
            sizes = [size if size > 0 else n for size, n in zip(given["block_size"], shape, strict=True)]
            values = values.reshape([n // size for n, size in zip(shape, sizes, strict=True)])
            for dim, size in enumerate(sizes):
                values = values.repeat_interleave(size, dim)
            return values
        return values if "per_token" in call.target.__name__ else values.reshape(())

    unsure = 0.0
    if isinstance(scale, Range):
        unsure = 2 * zero_point.radius.max() + 256 * (scale.radius / scale.middle).max()
    return x, along(scale), along(zero_point), low, high, dtype, unsure


def _chosen(call: _Call) -> Any:
    """Scales and zero points of the call. A zero point near the middle of two integers may be either."""
    x = call.args[0]
    scale, zero_point = call.target(x.middle.float(), *call.args[1:], **call.kwargs)
    relative = (x.radius.max() / x.middle.abs().max().clamp(min=1e-30)).item() + call.slack
    scale = scale.double()
    ends = torch.stack([x.middle.amin(), x.middle.amax(), *x.middle.amin(-1).flatten(), *x.middle.amax(-1).flatten()])
    parts = (ends / scale.min()).frac().abs() if scale.numel() == 1 else torch.tensor(0.5)
    is_sure = relative < 1e-4 and bool(((parts - 0.5).abs() > 1e-3).all())
    half = 0.0 if is_sure else 0.5
    zeros = zero_point.double()
    return [
        Range(scale * (1 - relative), scale * (1 + relative), torch.float32),
        Range(zeros - half, zeros + half, torch.int64),
    ]


_MOVES = """view reshape flatten permute transpose slice select cat stack chunk split split_with_sizes expand unsqueeze
squeeze contiguous clone detach dropout pad constant_pad_nd flip roll relu relu_ clamp hardtanh hardtanh_ relu6
max_pool1d max_pool2d max_pool3d maximum minimum amax amin getitem narrow"""
_SUMS = """mean sum avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d sigmoid
tanh leaky_relu leaky_relu_"""
_PRODUCTS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear matmul bmm"
_RULES: dict[str, Callable[[_Call], Any]] = {
    **dict.fromkeys(_MOVES.split(), _moved),
    **dict.fromkeys(_SUMS.split(), _monotone),
    **dict.fromkeys(_PRODUCTS.split(), _product),
    **dict.fromkeys(("silu", "silu_", "gelu"), _sloped(1.2)),
    **dict.fromkeys(("hardswish", "hardswish_"), _sloped(1.5)),
    **{f"{name}{end}": _combined(getattr(torch, name)) for name in ("add", "sub", "mul", "div") for end in ("", "_")},
    **dict.fromkeys(("softmax", "_softmax"), _softmax),
    **dict.fromkeys(
        ("quantize_per_tensor", "quantize_per_channel", "quantize_per_token", "quantize_affine"), _quantize
    ),
    **dict.fromkeys(
        ("dequantize_per_tensor", "dequantize_per_channel", "dequantize_per_token", "dequantize_affine"), _dequantize
    ),
    **dict.fromkeys(("choose_qparams", "choose_qparams_symmetric", "choose_qparams_affine"), _chosen),
    **dict.fromkeys(("choose_qparams_per_token", "choose_qparams_per_token_asymmetric"), _chosen),
    **dict.fromkeys(("to", "_to_copy", "float"), lambda call: call.widened(call.args[0].low, call.args[0].high)),
    "batch_norm": _batch_norm,
    "_assert_tensor_metadata": lambda call: None,
    "layer_norm": lambda call: _layer_norm(call),
}


def _layer_norm(call: _Call) -> Range:
    x, shape, weight, bias, *rest = call.args
    middle = call.target(x.middle, shape, weight.double(), bias.double(), *rest)
    dims = tuple(range(-len(shape), 0))
    deviation = (x.middle.var(dims, correction=0, keepdim=True) + 1e-5).sqrt()
    shift = 2 * (x.radius + x.radius.mean(dims, keepdim=True) + x.radius.square().mean(dims, keepdim=True).sqrt())
    spread = weight.double().abs() / deviation
    radius = shift * spread * (1 + (x.middle - x.middle.mean(dims, keepdim=True)).abs() / deviation)
    return call.widened(middle - radius, middle + radius, middle.abs() + x.middle.abs() * spread + 1.0)


def outside(ours: Tensor, expected: Range) -> Tensor:
    """How far each number of ours lies outside what is expected, float64; infinity where it is none and eager's is."""
    assert not expected.low.isnan().any() and not expected.high.isnan().any(), "bounds that are no numbers"
    wide = ours.double()
    apart = torch.maximum(expected.low - wide, wide - expected.high).clamp(min=0.0)
    return torch.where(wide.isnan(), torch.full_like(apart, torch.inf), apart)
