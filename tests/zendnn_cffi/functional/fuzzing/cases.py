"""Random calls that must succeed, each with what plain PyTorch gives in float64: a row per function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from tests.zendnn_cffi.functional.fuzzing.holding import Holder, as_tensor
from tests.zendnn_cffi.functional.fuzzing.post_ops import BINARY, ELTWISE, Chain, chain, numbers
from zendnn_cffi import functional as zf


@dataclass
class Case:
    """One call and its result.

    base      the result without post-ops, float64
    scale     what errors of the base are relative to; by default its largest magnitude
    dtype     of the result; by default that of the holder
    in_place  the operand that out may be
    exact     whether the base has no error but that of the result's type
    tolerant  factor on the tolerance, where a kernel approximates
    """

    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    base: torch.Tensor
    chain: Chain = field(default_factory=Chain)
    dtype: torch.dtype | None = None
    scale: float | None = None
    in_place: Any = None
    out: bool = True
    exact: bool = False
    tolerant: float = 1.0


def d(held: Any) -> torch.Tensor:
    """An operand in float64."""
    return as_tensor(held).double()


def spatial_sizes(h: Holder) -> tuple[int, list[int]]:
    count = h.r.choice([1, 2, 2, 2, 2, 3])
    return count, [h.r.choice([1, 2, 3, 5, 7, 9, 14] if count < 3 else [1, 2, 3, 5]) for _ in range(count)]


def _each(h: Holder, count: int, values: list[int]) -> list[int]:
    return [h.r.choice(values) for _ in range(count)]


def _bias(h: Holder, count: int) -> Any:
    return h.operand([count], h.r.choice([h.dtype, torch.float32])) if h.chance(0.5) else None


def convolution(h: Holder) -> Case | None:
    count, size = spatial_sizes(h)
    groups, n = h.r.choice([1, 1, 1, 2, 3, 16]), h.r.choice([1, 1, 2, 3])
    inputs, outputs = h.r.choice([1, 2, 3, 8, 16]), h.r.choice([1, 2, 5, 8, 16])
    if groups > 1 and h.chance(0.4):
        inputs = outputs = 1
    algorithm = h.r.choice(["direct", "direct", "direct", "auto", "winograd"])
    kernel = _each(h, count, [1, 1, 2, 3, 3, 5])
    stride, dilation = _each(h, count, [1, 1, 1, 2, 3]), _each(h, count, [1, 1, 1, 2])
    left, right = _each(h, count, [0, 0, 1, 2]), _each(h, count, [0, 0, 1, 2])
    if algorithm == "winograd":
        if count != 2 or h.dtype != torch.float32:
            return None
        kernel, stride, dilation, groups = [3, 3], [1, 1], [1, 1], 1
        left, right = [1, 1], [1, 1]
    if any((k - 1) * e + 1 > s + a + b for k, e, s, a, b in zip(kernel, dilation, size, left, right, strict=True)):
        return None
    x = h.operand([n, groups * inputs, *size])
    w = h.operand([groups * outputs, inputs, *kernel])
    b = _bias(h, groups * outputs)
    padded = F.pad(d(x), [p for pair in zip(reversed(left), reversed(right), strict=True) for p in pair])
    function = (F.conv1d, F.conv2d, F.conv3d)[count - 1]
    arguments = {"stride": tuple(stride), "dilation": tuple(dilation), "groups": groups}
    base = function(padded, d(w), None if b is None else d(b), **arguments)
    kwargs = {**arguments, "padding": left, "padding_r": right, "algorithm": algorithm}
    return Case(
        zf.convolution,
        [x, w, b],
        kwargs,
        base,
        chain(h, base.shape),
        scale=_sums(inputs * math.prod(kernel)),
        tolerant=20.0 if algorithm != "direct" else 1.0,
    )


def deconvolution(h: Holder) -> Case | None:
    count, size = spatial_sizes(h)
    groups, n = h.r.choice([1, 1, 1, 2, 3]), h.r.choice([1, 2, 3])
    inputs, outputs = h.r.choice([1, 2, 3, 8, 16]), h.r.choice([1, 2, 5, 16])
    kernel, stride = _each(h, count, [1, 2, 3, 4]), _each(h, count, [1, 1, 2, 3])
    dilation, padding = _each(h, count, [1, 1, 2]), _each(h, count, [0, 0, 1])
    extra = [h.r.randrange(max(s, e)) if h.chance(0.3) else 0 for s, e in zip(stride, dilation, strict=True)]
    arguments: dict[str, Any] = {
        "stride": tuple(stride),
        "padding": tuple(padding),
        "output_padding": tuple(extra),
        "dilation": tuple(dilation),
        "groups": groups,
    }
    sizes = zip(size, stride, kernel, dilation, padding, extra, strict=True)
    if any((s - 1) * st + (k - 1) * e + 1 - 2 * p + more < 1 for s, st, k, e, p, more in sizes):
        return None
    x, w = h.operand([n, groups * inputs, *size]), h.operand([groups * inputs, outputs, *kernel])
    b = _bias(h, groups * outputs)
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[count - 1]
    base = function(
        d(x),
        d(w),
        None if b is None else d(b),
        stride=tuple(stride),
        padding=tuple(padding),
        output_padding=tuple(extra),
        groups=groups,
        dilation=tuple(dilation),
    )
    scale = _sums(inputs * math.prod(kernel))
    return Case(zf.deconvolution, [x, w, b], arguments, base, chain(h, base.shape), scale=scale)


def _sums(count: int) -> float:
    return 3.0 * math.sqrt(count) + 3.0


def inner_product(h: Holder) -> Case:
    leading, k, n = h.sizes(0, 2), h.r.choice([1, 2, 3, 8, 17, 64, 100]), h.r.choice([1, 2, 3, 16, 33, 64])
    x, w, b = h.operand([*leading, k]), h.operand([n, k]), _bias(h, n)
    base = F.linear(d(x), d(w), None if b is None else d(b))
    made = chain(h, (math.prod(leading), n), prelu=False)
    flat = base.reshape(-1, n)
    return Case(zf.inner_product, [x, w, b], {}, flat, made, scale=_sums(k), out=len(leading) == 1)


def matmul(h: Holder) -> Case:
    batch = h.sizes(0, 2)
    m, k, n = h.size(), h.r.choice([1, 2, 3, 8, 17, 64]), h.r.choice([1, 2, 3, 16, 33])
    one = [s if h.chance(0.7) else 1 for s in batch]
    a = h.operand([*(batch if h.chance(0.6) else one), m, k] if h.chance(0.9) else [k])
    b = h.operand([*(one if a is not None and h.chance(0.3) else batch), k, n] if h.chance(0.9) else [k])
    if h.chance(0.1) and d(a).dim() >= 2 and not h.numpy:
        b = h.remember(a.transpose(-1, -2))
    plain = d(a) @ d(b)
    bias = None
    if h.chance(0.5):
        shape = [s if h.chance(0.6) else 1 for s in plain.shape]
        bias = h.operand(shape[h.r.randint(0, len(shape)) :], h.r.choice([h.dtype, torch.float32]))
    base = plain if bias is None else plain + d(bias)
    column = d(b).dim() == 1
    full = base.unsqueeze(-1) if column else base
    full = full.unsqueeze(-2) if d(a).dim() == 1 else full
    made = chain(h, full.shape, prelu=False)
    return Case(zf.matmul, [a, b, bias], {}, full, made, scale=_sums(k) + largest(bias))


def largest(held: Any) -> float:
    return 0.0 if held is None or d(held).numel() == 0 else float(d(held).abs().max())


def eltwise(h: Holder) -> Case:
    kind = h.r.choice([*ELTWISE])
    if kind == "round":
        h.dtype = torch.float32
    alpha, beta = numbers(h, kind)
    x = h.operand(h.sizes(0, 5), positive=kind in ("log", "sqrt", "pow"))
    base = ELTWISE[kind](d(x), alpha, beta)
    return Case(zf.eltwise, [x, kind, alpha, beta], {}, base, in_place=x, exact=kind == "round")


def binary(h: Holder) -> Case:
    shape, kind = h.sizes(0, 4), h.r.choice([*BINARY])
    a: Any = h.operand([s if h.chance(0.8) else 1 for s in shape])
    b: Any = h.operand(
        [s if h.chance(0.7) else 1 for s in shape][h.r.choice([0, 0, 0, 1]) :],
        h.r.choice([h.dtype, torch.float32]) if h.chance(0.2) else None,
        positive=kind == "div",
    )
    if h.chance(0.1):
        b = h.r.choice([2.0, -0.5, 3])
    elif h.chance(0.1):
        a = h.r.choice([2.0, -0.5, 3])
    x, y = (torch.tensor(float(v), dtype=torch.float64) if isinstance(v, (int, float)) else d(v) for v in (a, b))
    base = BINARY[kind](x, y)
    dtype = as_tensor(b).dtype if isinstance(a, (int, float)) else as_tensor(a).dtype
    made = chain(h, base.shape if base.dim() else (1,), prelu=False)
    return Case(zf.binary, [a, b, kind], {}, base, made, dtype=dtype, in_place=None if isinstance(a, float) else a)


def softmax(h: Holder) -> Case:
    x = h.operand(h.sizes(1, 4))
    dim = h.r.randrange(-d(x).dim(), d(x).dim())
    log = h.chance(0.5)
    base = (F.log_softmax if log else F.softmax)(d(x), dim)
    return Case(zf.log_softmax if log else zf.softmax, [x, dim], {}, base, in_place=x, scale=largest(base) + 1)


def prelu(h: Holder) -> Case:
    x = h.operand(h.sizes(1, 4))
    shape = as_tensor(x).shape
    weight = h.operand([h.r.choice([1, shape[1] if len(shape) > 1 else 1])])
    return Case(zf.prelu, [x, weight], {}, F.prelu(d(x), d(weight)), in_place=x)


def pooling(h: Holder) -> Case | None:
    count, size = spatial_sizes(h)
    kind, integer = h.r.choice(["max", "avg_include_padding", "avg_exclude_padding"]), h.chance(0.1)
    kernel, stride = _each(h, count, [1, 2, 3]), _each(h, count, [1, 2, 3])
    dilation = _each(h, count, [1, 1, 2]) if h.chance(0.3) else [1] * count
    reach = [(k - 1) * e + 1 for k, e in zip(kernel, dilation, strict=True)]
    left = [h.r.randint(0, r - 1) if h.chance(0.4) else 0 for r in reach]
    right = [h.r.randint(0, r - 1) if h.chance(0.4) else 0 for r in reach]
    ceil = kind != "avg_include_padding" and h.chance(0.3)
    if any(s + a + b < r for s, a, b, r in zip(size, left, right, reach, strict=True)):
        return None
    shape = [h.r.choice([1, 2, 3]), h.size(), *size]
    kwargs: dict[str, Any] = {"stride": stride, "padding": left, "padding_r": right, "dilation": dilation}
    if ceil:
        kwargs["ceil_mode"] = True
    if integer:
        x = h.hold(torch.randint(0, 100, shape, generator=h.generator).to(h.r.choice([torch.int8, torch.uint8])))
    else:
        x = h.operand(shape)
    base = _pooled(d(x), kind, kernel, stride, left, right, dilation, ceil)
    if base is None:
        return None
    base = base.round() if integer else base
    return Case(zf.pooling, [x, kind, kernel], kwargs, base, dtype=as_tensor(x).dtype)


def _pooled(
    x: torch.Tensor,
    kind: str,
    kernel: list[int],
    stride: list[int],
    left: list[int],
    right: list[int],
    dilation: list[int],
    ceil: bool,
) -> torch.Tensor | None:
    """Gather every window, the padding as NaN, and reduce."""
    for i, (k, s, a, b, e) in enumerate(zip(kernel, stride, left, right, dilation, strict=True)):
        axis, size = 2 + 2 * i, x.shape[2 + 2 * i]
        room = size + a + b - ((k - 1) * e + 1)
        count = (-(-room // s) if ceil else room // s) + 1
        if ceil and (count - 1) * s >= size + a:
            count -= 1
        places = torch.arange(count)[:, None] * s + torch.arange(k)[None] * e - a
        taken = x.index_select(axis, places.clamp(0, size - 1).reshape(-1)).unflatten(axis, (count, k))
        outside = ((places < 0) | (places >= size)).reshape([*places.shape, *[1] * (x.dim() - axis - 1)])
        x = taken.masked_fill(outside, torch.nan)
    windows = tuple(3 + 2 * i for i in range(len(kernel)))
    if bool(x.isnan().flatten(2).all(-1).any()) or not x.numel():
        return None
    if kind == "max":
        return x.nan_to_num(-torch.inf).amax(windows)
    total = x.nan_to_num(0.0).sum(windows)
    divisor = (~x.isnan()).sum(windows) if kind == "avg_exclude_padding" else math.prod(kernel)
    return None if bool((torch.as_tensor(divisor) == 0).any()) else total / divisor


def resampling(h: Holder) -> Case:
    count, size = spatial_sizes(h)
    kind = h.r.choice(["nearest", "linear"])
    x = h.operand([h.r.choice([1, 2]), h.size(), *size])
    kwargs: dict[str, Any] = {}
    if h.chance(0.3):
        kwargs["scale_factor"] = h.r.choice([1.0, 2.0, 3.0])
        target = [int(s * kwargs["scale_factor"]) for s in size]
    else:
        target = kwargs["size"] = _each(h, count, [1, 2, 3, 7, 8, 13])
    mode = "nearest-exact" if kind == "nearest" else ("linear", "bilinear", "trilinear")[count - 1]
    base = F.interpolate(d(x), size=target, mode=mode)
    return Case(zf.resampling, [x, kind], kwargs, base)


def reduction(h: Holder) -> Case:
    x = h.operand(h.sizes(1, 5))
    rank = d(x).dim()
    kind = h.r.choice(["sum", "mean", "max", "min", "mul"] * 2 + list(_NORMS))
    dims: Any = h.r.choice([None, h.r.sample(range(rank), h.r.randint(1, rank)), h.r.randrange(-rank, rank)])
    axes = tuple(range(rank)) if dims is None else tuple(dims) if isinstance(dims, list) else (dims,)
    keep, p, eps = h.chance(0.5), h.r.choice([1.0, 2.0, 3.0]), h.r.choice([0.0, 0.0, 0.5])
    kwargs: dict[str, Any] = {}
    if kind in _NORMS:
        kwargs = {"p": p, "eps": eps}
        base = _NORMS[kind](d(x).abs().pow(p).sum(axes, keepdim=keep), p, eps)
    elif kind == "mul":
        base = d(x)
        for axis in sorted((a % rank for a in axes), reverse=True):
            base = base.prod(axis, keepdim=keep)
    else:
        base = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}[kind](
            d(x), axes, keepdim=keep
        )
    count = d(x).numel() / max(base.numel(), 1)
    scale = _sums(int(count)) if kind in ("sum", "mean") else None
    return Case(zf.reduction, [x, kind, dims, keep], kwargs, base, scale=scale)


_NORMS: dict[str, Callable[[torch.Tensor, float, float], torch.Tensor]] = {
    "norm_lp_max": lambda s, p, eps: s.clamp_min(eps) ** (1 / p),
    "norm_lp_sum": lambda s, p, eps: (s + eps) ** (1 / p),
    "norm_lp_power_p_max": lambda s, p, eps: s.clamp_min(eps),
    "norm_lp_power_p_sum": lambda s, p, eps: s + eps,
}


def shuffle(h: Holder) -> Case:
    shape = h.sizes(1, 4)
    axis, groups = h.r.randrange(len(shape)), h.r.choice([1, 2, 3, 4])
    shape[axis] *= groups
    x = h.operand(shape)
    base = d(x).movedim(axis, 0).unflatten(0, (groups, -1)).transpose(0, 1).flatten(0, 1).movedim(0, axis)
    return Case(zf.shuffle, [x, groups, axis], {}, base)


def reorder(h: Holder) -> Case:
    shape = h.sizes(0, 5)
    x = h.operand(shape)
    dtype = h.r.choice([torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int32])
    scale = h.r.choice([1.0, 1.0, 2.0, 50.0])
    base = (d(x) * scale).float().double()
    if not dtype.is_floating_point:
        base = base.round().clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    layout = h.r.choice(["same", "contiguous", *(["channels_last"] if 3 <= len(shape) <= 5 else [])])
    return Case(zf.reorder, [x], {"dtype": dtype, "layout": layout, "scale": scale}, base, dtype=dtype, exact=True)


def embedding_bag(h: Holder) -> Case:
    rows, width = h.r.choice([1, 9, 50]), h.r.choice([1, 3, 16, 17, 64, 100, 130])
    table, kind = h.operand([rows, width]), h.r.choice(["sum", "mean", "max"])
    kwargs: dict[str, Any] = {"padding_idx": h.r.choice([None, None, 0, -1])}
    two = h.chance(0.3)
    shape = [h.r.choice([1, 2, 5]), h.r.choice([1, 2, 7])] if two else [h.r.choice([0, 1, 5, 23])]
    index = torch.randint(rows, shape, generator=h.generator).to(h.r.choice([torch.int32, torch.int64]))
    indices = h.hold(index)
    offsets = None
    if not two:
        starts = [0, *sorted(h.r.randint(0, shape[0]) for _ in range(h.r.randint(0, 5)))]
        kwargs["include_last_offset"] = last = h.chance(0.3)
        offsets = h.hold(torch.tensor([*starts, shape[0]] if last else starts, dtype=index.dtype))
        if last:
            as_tensor(offsets)  # expanded ones lose their end
            if int(as_tensor(offsets)[-1]) != shape[0]:
                offsets = torch.tensor([*starts, shape[0]], dtype=index.dtype)
    weights = h.operand(shape, torch.float32) if kind == "sum" and h.chance(0.4) else None
    base = F.embedding_bag(
        as_tensor(indices).contiguous(),
        d(table),
        None if offsets is None else as_tensor(offsets).contiguous(),
        mode=kind,
        padding_idx=kwargs["padding_idx"],
        include_last_offset=kwargs.get("include_last_offset", False),
        per_sample_weights=None if weights is None else d(weights).contiguous(),
    )
    kwargs["weights"] = weights
    return Case(zf.embedding_bag, [table, indices, offsets, kind], kwargs, base, out=False, scale=20.0)


ROWS: tuple[Callable[[Holder], Case | None], ...] = (
    convolution,
    convolution,
    deconvolution,
    inner_product,
    inner_product,
    matmul,
    matmul,
    eltwise,
    binary,
    binary,
    softmax,
    prelu,
    pooling,
    resampling,
    reduction,
    shuffle,
    reorder,
    embedding_bag,
)
