"""What a primitive should compute: plain PyTorch, in float64, of any operation descriptor and attributes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from zendnn_cffi.primitives.attributes import (
    ARG_ATTR_ZERO_POINTS,
    ARG_BIAS,
    ARG_MEAN,
    ARG_SCALE,
    ARG_SHIFT,
    ARG_SRC,
    ARG_SRC_1,
    ARG_SRC_2,
    ARG_SRC_3,
    ARG_SRC_ITER,
    ARG_SRC_ITER_C,
    ARG_VARIANCE,
    ARG_WEIGHTS,
    ARG_WEIGHTS_ITER,
    ARG_WEIGHTS_PROJECTION,
    Attr,
)
from zendnn_cffi.primitives.descriptors import NORM_GLOBAL_STATS, NORM_RELU, OpDesc
from zendnn_cffi.primitives.verification.reference_post_ops import BINARY, ELTWISE, Values, applied

_Function = Callable[[OpDesc, Values], torch.Tensor]


def expected(op: OpDesc, attr: Attr, values: Values) -> torch.Tensor:
    """Return what dst should hold, float64, before it is rounded to dst's type.

    values  the operands by argument id, float64 in the descriptors' dims; indices and offsets int64; ARG_DST is what
            dst held before, where a sum post-op reads it
    Raises  NotImplementedError for what there is no reference of
    """
    function = _KINDS.get(op.kind)
    if function is None:
        raise NotImplementedError(f"no reference for {op.kind}")
    zero = values.get(ARG_ATTR_ZERO_POINTS | ARG_SRC)
    if zero is not None:
        values = {**values, ARG_SRC: values[ARG_SRC] - zero.reshape(-1)[0]}
    return applied(function(op, values), attr, values)


def _convolution(op: OpDesc, values: Values) -> torch.Tensor:
    src, weights, groups = values[ARG_SRC], values[ARG_WEIGHTS], 1
    spatial = src.dim() - 2
    if weights.dim() > src.dim():
        groups, weights = weights.shape[0], weights.flatten(0, 1)
    pads = _pads(op, op.params["padding_l"], op.params["padding_r"])
    convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
    x = convolve(F.pad(src, pads), weights, None, op.params["strides"], 0, op.params["dilation"], groups)
    return _with_bias(x, values)


def _deconvolution(op: OpDesc, values: Values) -> torch.Tensor:
    src, weights, groups = values[ARG_SRC], values[ARG_WEIGHTS], 1
    spatial = src.dim() - 2
    if weights.dim() > src.dim():
        groups = weights.shape[0]
        weights = weights.transpose(1, 2).flatten(0, 1)
    else:
        weights = weights.transpose(0, 1)
    convolve: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[spatial - 1]
    x = convolve(src, weights, None, op.params["strides"], 0, 0, groups, op.params["dilation"])
    negative = [[-p for p in op.params[side]] for side in ("padding_l", "padding_r")]
    return _with_bias(F.pad(x, _pads(op, *negative)), values)


def _pads(op: OpDesc, left: Any, right: Any) -> list[int]:
    """Return the padding of the spatial dimensions in the order of torch's pad."""
    return [p for pair in zip(reversed(left), reversed(right), strict=True) for p in pair]


def _with_bias(x: torch.Tensor, values: Values) -> torch.Tensor:
    bias = values.get(ARG_BIAS)
    return x if bias is None else x + bias.reshape([-1 if i == 1 else 1 for i in range(x.dim())])


def _inner_product(op: OpDesc, values: Values) -> torch.Tensor:
    return _with_bias(values[ARG_SRC].flatten(1) @ values[ARG_WEIGHTS].flatten(1).t(), values)


def _matmul(op: OpDesc, values: Values) -> torch.Tensor:
    x = values[ARG_SRC] @ values[ARG_WEIGHTS]
    return x if ARG_BIAS not in values else x + values[ARG_BIAS]


def _pooling(op: OpDesc, values: Values) -> torch.Tensor:
    p, x = op.params, values[ARG_SRC]
    pads = _pads(op, p["padding_l"], p["padding_r"])
    windows = _windows(F.pad(x, pads, value=-math.inf if p["kind"] == "max" else 0.0), p)
    if p["kind"] == "max":
        return windows.amax(-1)
    if p["kind"] == "avg_include_padding":
        return windows.mean(-1)
    return windows.sum(-1) / _windows(F.pad(torch.ones_like(x), pads), p).sum(-1)


def _windows(x: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
    """Return the elements of every window, [N, C, *out, elements]."""
    rank = x.dim()
    for i, (k, s, d) in enumerate(zip(params["kernel"], params["strides"], params["dilation"], strict=True)):
        x = x.unfold(2 + i, (k - 1) * d + 1, s)[..., ::d]
    return x.flatten(rank)


def _eltwise(op: OpDesc, values: Values) -> torch.Tensor:
    return ELTWISE[op.params["kind"]](values[ARG_SRC], op.params["alpha"], op.params["beta"])


def _binary(op: OpDesc, values: Values) -> torch.Tensor:
    return BINARY[op.params["kind"]](values[ARG_SRC], values[ARG_SRC_1]).double()


def _softmax(op: OpDesc, values: Values) -> torch.Tensor:
    function = torch.log_softmax if op.params["log"] else torch.softmax
    return function(values[ARG_SRC], op.params["axis"])


def _batch_normalization(op: OpDesc, values: Values) -> torch.Tensor:
    x = values[ARG_SRC]
    shape = [-1 if i == 1 else 1 for i in range(x.dim())]
    mean, variance = (values[arg].reshape(shape) for arg in (ARG_MEAN, ARG_VARIANCE))
    x = (x - mean) / (variance + op.params["eps"]).sqrt()
    x = _scaled(x, values, shape)
    return x.relu() if op.params["flags"] & NORM_RELU else x


def _layer_normalization(op: OpDesc, values: Values) -> torch.Tensor:
    x = values[ARG_SRC]
    if op.params["flags"] & NORM_GLOBAL_STATS:
        mean, variance = values[ARG_MEAN].unsqueeze(-1), values[ARG_VARIANCE].unsqueeze(-1)
    else:
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return _scaled((x - mean) / (variance + op.params["eps"]).sqrt(), values, [-1])


def _scaled(x: torch.Tensor, values: Values, shape: list[int]) -> torch.Tensor:
    if ARG_SCALE in values:
        x = x * values[ARG_SCALE].reshape(shape)
    return x + values[ARG_SHIFT].reshape(shape) if ARG_SHIFT in values else x


def _lrn(op: OpDesc, values: Values) -> torch.Tensor:
    p, x = op.params, values[ARG_SRC]
    size, before = p["local_size"], (p["local_size"] - 1) // 2
    after = size - 1 - before
    squares, axes = x * x, [1] if p["kind"] == "across_channels" else list(range(2, x.dim()))
    for axis in axes:
        pads = [0, 0] * (x.dim() - 1 - axis) + [before, after]
        squares = F.pad(squares, pads).unfold(axis, size, 1).sum(-1)
    return x * (p["k"] + p["alpha"] * squares / size ** len(axes)) ** -p["beta"]


def _reduction(op: OpDesc, values: Values) -> torch.Tensor:
    kind, p, eps = (op.params[name] for name in ("kind", "p", "eps"))
    x, kept = values[ARG_SRC], op.descs["dst"]
    assert kept is not None
    axes = [i for i, (s, d) in enumerate(zip(x.shape, kept.dims, strict=True)) if s != d]
    if kind == "mul":
        for axis in axes:
            x = x.prod(axis, keepdim=True)
        return x
    if kind in ("max", "min", "sum", "mean"):
        function: Any = {"max": torch.amax, "min": torch.amin, "sum": torch.sum, "mean": torch.mean}[kind]
        return torch.as_tensor(function(x, axes, keepdim=True))
    power = (x.abs() ** p).sum(axes, keepdim=True)
    power = power.clamp_min(eps) if kind.endswith("max") else power + eps
    return power if "power" in kind else power ** (1 / p)


def _resampling(op: OpDesc, values: Values) -> torch.Tensor:
    x, dst = values[ARG_SRC], op.descs["dst"]
    assert dst is not None
    spatial = x.dim() - 2
    if op.params["kind"] == "nearest":
        return F.interpolate(x, dst.dims[2:], mode="nearest-exact")
    return F.interpolate(x, dst.dims[2:], mode=("linear", "bilinear", "trilinear")[spatial - 1], align_corners=False)


def _prelu(op: OpDesc, values: Values) -> torch.Tensor:
    x = values[ARG_SRC]
    return torch.where(x > 0, x, x * values[ARG_WEIGHTS])


def _shuffle(op: OpDesc, values: Values) -> torch.Tensor:
    x, axis, groups = values[ARG_SRC], op.params["axis"], op.params["groups"]
    return x.unflatten(axis, (groups, -1)).transpose(axis, axis + 1).flatten(axis, axis + 1)


def _embedding_bag(op: OpDesc, values: Values) -> torch.Tensor:
    indices, offsets, weights = values[ARG_SRC_1], values[ARG_SRC_2], values.get(ARG_SRC_3)
    padding, kind = op.params["padding_idx"], op.params["kind"]
    ends = [*offsets.tolist()[1:], len(indices)]
    rows = []
    for start, end in zip(offsets.tolist(), ends, strict=True):
        kept = indices[start:end] != padding
        bag = values[ARG_SRC][indices[start:end][kept]]
        if kind == "max":
            rows.append(bag.amax(0))
            continue
        factor = bag.new_ones(len(bag)) if weights is None else weights[start:end][kept]
        total = (bag * factor.unsqueeze(1)).sum(0)
        rows.append(total / factor.sum() if kind == "mean" else total)
    return torch.stack(rows)


def _recurrent(op: OpDesc, values: Values) -> torch.Tensor:
    """The sequence of hidden states, step by step; gates in the library's order."""
    src, kind, bias = values[ARG_SRC], op.params["kind"], values[ARG_BIAS][0, 0]
    weights, recurrent = (values[arg][0, 0].flatten(1) for arg in (ARG_WEIGHTS, ARG_WEIGHTS_ITER))
    hidden = bias.shape[-1]
    zeros = src.new_zeros(src.shape[1], weights.shape[1])
    h = values[ARG_SRC_ITER][0, 0] if ARG_SRC_ITER in values else zeros[:, : recurrent.shape[0]]
    c = values[ARG_SRC_ITER_C][0, 0] if ARG_SRC_ITER_C in values else zeros[:, :hidden]
    steps = range(len(src))
    outputs: dict[int, torch.Tensor] = {}
    for step in reversed(steps) if op.params["reverse"] else steps:
        x, y = src[step] @ weights, h @ recurrent
        if kind == "gru":
            update, reset = (x + y + bias[:3].flatten())[:, : 2 * hidden].sigmoid().split(hidden, 1)
            new = (x[:, 2 * hidden :] + bias[2] + reset * (y[:, 2 * hidden :] + bias[3])).tanh()
            h = update * h + (1 - update) * new
        elif kind == "lstm":
            entry, forget, cell, output = (x + y + bias.flatten()).split(hidden, 1)
            c = forget.sigmoid() * c + entry.sigmoid() * cell.tanh()
            h = output.sigmoid() * c.tanh()
            h = h @ values[ARG_WEIGHTS_PROJECTION][0, 0] if ARG_WEIGHTS_PROJECTION in values else h
        else:
            h = (x + y + bias.flatten()).tanh() if kind == "rnn_tanh" else (x + y + bias.flatten()).relu()
        outputs[step] = h
    return torch.stack([outputs[step] for step in steps])


def _same(op: OpDesc, values: Values) -> torch.Tensor:
    return values[ARG_SRC]


_KINDS: dict[str, _Function] = {
    "reorder": _same,
    "shuffle": _shuffle,
    "convolution": _convolution,
    "deconvolution": _deconvolution,
    "eltwise": _eltwise,
    "softmax": _softmax,
    "pooling": _pooling,
    "lrn": _lrn,
    "batch_normalization": _batch_normalization,
    "layer_normalization": _layer_normalization,
    "inner_product": _inner_product,
    "binary": _binary,
    "logsoftmax": _softmax,
    "matmul": _matmul,
    "resampling": _resampling,
    "pooling_v2": _pooling,
    "reduction": _reduction,
    "prelu": _prelu,
    "rnn": _recurrent,
    "softmax_v2": _softmax,
    "embedding_bag": _embedding_bag,
}
