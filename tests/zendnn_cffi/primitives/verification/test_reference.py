"""The reference in float64 against PyTorch's own modules and formulas written another way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.tolerance import assert_close
from zendnn_cffi import descriptors as d
from zendnn_cffi.primitives import attributes
from zendnn_cffi.primitives.attributes import (
    ARG_ATTR_OUTPUT_SCALES,
    ARG_ATTR_POST_OP_DW,
    ARG_ATTR_SCALES,
    ARG_ATTR_ZERO_POINTS,
    ARG_BIAS,
    ARG_DST,
    ARG_MEAN,
    ARG_SCALE,
    ARG_SHIFT,
    ARG_SRC,
    ARG_SRC_1,
    ARG_SRC_2,
    ARG_SRC_3,
    ARG_VARIANCE,
    ARG_WEIGHTS,
    ARG_WEIGHTS_ITER,
    Attr,
    PostOps,
    arg_post_op,
)
from zendnn_cffi.primitives.descriptors import OpDesc
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.verification import reference, reference_post_ops
from zendnn_cffi.primitives.verification.cases_recurrent import layer
from zendnn_cffi.primitives.verification.reference import expected

F32, S8 = torch.float32, torch.int8


def md(*dims: int, dtype: torch.dtype = F32, tag: str | None = None) -> MemoryDesc:
    return MemoryDesc(dims, dtype, tag)


def noise(*dims: int) -> torch.Tensor:
    return torch.randn(dims, dtype=torch.float64)


IMAGE = noise(2, 6, 7, 8)
WIDE, OTHER = noise(4, 6), noise(4, 6)


def image_op(kind: str, **params: Any) -> OpDesc:
    return OpDesc(kind, None, {"src": md(2, 6, 7, 8)}, params)


def convolution(grouped: bool) -> tuple[OpDesc, dict[int, torch.Tensor], torch.Tensor]:
    weights, bias = noise(4, 3, 3, 2) if grouped else noise(4, 6, 3, 2), noise(4)
    layer = F.conv2d(F.pad(IMAGE, (1, 2, 2, 0)), weights, bias, (2, 1), dilation=(1, 2), groups=2 if grouped else 1)
    shown = weights.unflatten(0, (2, 2)) if grouped else weights
    op = d.convolution(
        md(2, 6, 7, 8), md(*shown.shape), md(4), md(*layer.shape), strides=(2, 1), dilation=(1, 2), padding_l=(2, 1),
        padding_r=(0, 2),
    )  # fmt: skip
    return op, {ARG_SRC: IMAGE, ARG_WEIGHTS: shown, ARG_BIAS: bias}, layer


def deconvolution(grouped: bool) -> tuple[OpDesc, dict[int, torch.Tensor], torch.Tensor]:
    groups = 2 if grouped else 1
    weights, bias = noise(6, 4 // groups, 3, 3), noise(4)  # torch's order: inputs first
    layer = F.conv_transpose2d(IMAGE, weights, bias, 2, 1, output_padding=1, groups=groups)
    shown = weights.unflatten(0, (2, 3)).transpose(1, 2) if grouped else weights.transpose(0, 1)
    op = d.deconvolution(md(2, 6, 7, 8), md(*shown.shape), md(4), md(*layer.shape), strides=2, padding_l=1, padding_r=0)
    return op, {ARG_SRC: IMAGE, ARG_WEIGHTS: shown, ARG_BIAS: bias}, layer


def pooling(kind: str, dilation: int) -> tuple[OpDesc, dict[int, torch.Tensor], torch.Tensor]:
    if kind == "max":
        wanted = F.max_pool2d(IMAGE, 3, 2, 1, dilation)
    else:
        wanted = F.avg_pool2d(IMAGE, 3, 2, 1, count_include_pad=kind == "avg_include_padding")
    op = d.pooling(kind, md(2, 6, 7, 8), md(*wanted.shape), kernel=3, strides=2, dilation=dilation, padding_l=1)
    return op, {ARG_SRC: IMAGE}, wanted


def reduction(kind: str) -> tuple[OpDesc, dict[int, torch.Tensor], torch.Tensor]:
    x = IMAGE.permute(0, 2, 1, 3).flatten(2)  # dims 1 and 3 of the image, last
    p, eps = (3.0, 0.25) if kind.startswith("norm") else (0.0, 0.0)
    power = x.abs().pow(3.0).sum(-1)
    wanted = {
        "max": x.max(-1).values,
        "min": x.min(-1).values,
        "sum": x.sum(-1),
        "mean": x.mean(-1),
        "mul": x.prod(-1),
        "norm_lp_max": power.maximum(torch.tensor(eps)).pow(1 / 3),
        "norm_lp_sum": (power + eps).pow(1 / 3),
        "norm_lp_power_p_max": power.maximum(torch.tensor(eps)),
        "norm_lp_power_p_sum": power + eps,
    }[kind]
    return d.reduction(kind, md(2, 6, 7, 8), md(2, 1, 7, 1), p=p, eps=eps), {ARG_SRC: IMAGE}, wanted[:, None, :, None]


def batch_norm() -> tuple[OpDesc, dict[int, torch.Tensor], torch.Tensor]:
    mean, variance, scale, shift = noise(6), noise(6).abs(), noise(6), noise(6)
    wanted = F.batch_norm(IMAGE, mean, variance, scale, shift, eps=0.01).relu()
    values = {ARG_SRC: IMAGE, ARG_MEAN: mean, ARG_VARIANCE: variance, ARG_SCALE: scale, ARG_SHIFT: shift}
    return d.batch_normalization(md(2, 6, 7, 8), 0.01, relu=True), values, wanted


def layer_norm(given: bool) -> tuple[OpDesc, dict[int, torch.Tensor], torch.Tensor]:
    scale, shift = noise(8), noise(8)
    values = {ARG_SRC: IMAGE, ARG_SCALE: scale, ARG_SHIFT: shift}
    if given:
        values |= {ARG_MEAN: noise(2, 6, 7), ARG_VARIANCE: noise(2, 6, 7).abs()}
        centred = (IMAGE - values[ARG_MEAN][..., None]) * (values[ARG_VARIANCE][..., None] + 0.01).rsqrt()
        wanted = centred * scale + shift
    else:
        wanted = F.layer_norm(IMAGE, (8,), scale, shift, 0.01)
    return d.layer_normalization(md(2, 6, 7, 8), 0.01, given_statistics=given), values, wanted


def embedding_bag(kind: str, weighted: bool, padding: int) -> tuple[OpDesc, dict[int, torch.Tensor], torch.Tensor]:
    table, indices, offsets = noise(9, 5), torch.tensor([1, 8, 3, 3, 0, 7]), torch.tensor([0, 2, 3])
    weights = noise(6) if weighted else None
    wanted = F.embedding_bag(
        indices, table, offsets, mode=kind, per_sample_weights=weights, padding_idx=padding if padding >= 0 else None
    )
    op = d.embedding_bag(
        kind, md(9, 5), md(6, dtype=torch.int32), md(3, dtype=torch.int32), md(6) if weighted else None, md(3, 5),
        padding_idx=padding,
    )  # fmt: skip
    values = {ARG_SRC: table, ARG_SRC_1: indices, ARG_SRC_2: offsets}
    return op, values if weights is None else {**values, ARG_SRC_3: weights}, wanted


def matmul() -> tuple[OpDesc, dict[int, torch.Tensor], torch.Tensor]:
    a, b, bias = noise(2, 1, 3, 4), noise(1, 5, 4, 6), noise(1, 1, 1, 6)
    op = d.matmul(md(2, 1, 3, 4), md(1, 5, 4, 6), md(1, 1, 1, 6), md(2, 5, 3, 6))
    return op, {ARG_SRC: a, ARG_WEIGHTS: b, ARG_BIAS: bias}, torch.einsum("axij,xbjk->abik", a, b) + bias


def inner_product() -> tuple[OpDesc, dict[int, torch.Tensor], torch.Tensor]:
    weights, bias = noise(5, 6, 7, 8), noise(5)
    op = d.inner_product(md(2, 6, 7, 8), md(5, 6, 7, 8), md(5), md(2, 5))
    wanted = torch.einsum("nchw,ochw->no", IMAGE, weights) + bias
    return op, {ARG_SRC: IMAGE, ARG_WEIGHTS: weights, ARG_BIAS: bias}, wanted


def resampling(kind: str) -> tuple[OpDesc, dict[int, torch.Tensor], torch.Tensor]:
    mode = {"nearest": "nearest-exact", "linear": "bilinear"}[kind]
    wanted = torch.nn.Upsample((14, 12), mode=mode)(IMAGE)
    return d.resampling(kind, md(2, 6, 7, 8), md(2, 6, 14, 12)), {ARG_SRC: IMAGE}, wanted


def lrn_within() -> torch.Tensor:
    sums = F.avg_pool2d(IMAGE * IMAGE, 3, 1, 1)  # of nine squares, those outside being 0
    return IMAGE * (2.0 + 0.5 * sums) ** -0.75


SLOPES = noise(1, 6, 1, 1)
GATES = {"rnn_tanh": 1, "rnn_relu": 1, "lstm": 4, "gru": 3}


def recurrent(kind: str) -> tuple[Any, ...]:
    """PyTorch's network: gates in the library's order, of a GRU one bias more."""
    torch.manual_seed(0)
    sizes = steps, samples, inputs, hidden = 4, 2, 5, 3
    name, *rest = kind.split("_")
    network = {"rnn": torch.nn.RNN, "lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[name](
        inputs, hidden, dtype=torch.float64, **({"nonlinearity": rest[0]} if rest else {})
    )
    order = [1, 0, 2] if kind == "gru" else list(range(GATES[kind]))

    def by_gate(weight: torch.Tensor) -> torch.Tensor:
        return weight.detach().unflatten(0, (len(order), hidden))[order]

    first, second = by_gate(network.bias_ih_l0), by_gate(network.bias_hh_l0)
    bias = torch.cat([first[:2] + second[:2], first[2:], second[2:]]) if kind == "gru" else first + second
    x = torch.randn(steps, samples, inputs, dtype=torch.float64)
    values = {ARG_SRC: x, ARG_WEIGHTS: by_gate(network.weight_ih_l0).permute(2, 0, 1)[None, None]}
    values |= {ARG_WEIGHTS_ITER: by_gate(network.weight_hh_l0).permute(2, 0, 1)[None, None], ARG_BIAS: bias[None, None]}
    return layer(kind, torch.float32, sizes), values, network(x)[0].detach()


EXAMPLES: dict[str, tuple[str, Callable[[], tuple[OpDesc, dict[int, torch.Tensor], torch.Tensor]]]] = {
    "convolution": ("convolution", lambda: convolution(False)),
    "grouped convolution": ("convolution", lambda: convolution(True)),
    "deconvolution": ("deconvolution", lambda: deconvolution(False)),
    "grouped deconvolution": ("deconvolution", lambda: deconvolution(True)),
    "inner_product": ("inner_product", inner_product),
    "matmul": ("matmul", matmul),
    **{f"pooling {k}": ("pooling", lambda k=k: pooling(k, 1)) for k in d.POOLING},  # type: ignore[misc]
    "dilated pooling": ("pooling_v2", lambda: pooling("max", 2)),
    "eltwise": ("eltwise", lambda: (d.eltwise("elu", md(4, 6), 0.5), {ARG_SRC: WIDE}, F.elu(WIDE, 0.5))),
    "binary": (
        "binary",
        lambda: (d.binary("sub", md(4, 6), md(4, 6), md(4, 6)), {ARG_SRC: WIDE, ARG_SRC_1: OTHER}, WIDE - OTHER),
    ),
    "softmax": ("softmax", lambda: (d.softmax(md(4, 6), 0), {ARG_SRC: WIDE}, WIDE.exp() / WIDE.exp().sum(0))),
    "logsoftmax": (
        "logsoftmax",
        lambda: (d.softmax(md(4, 6), 1, True), {ARG_SRC: WIDE}, WIDE - WIDE.logsumexp(1, keepdim=True)),
    ),
    "softmax_v2": (
        "softmax_v2",
        lambda: (d.softmax(md(4, 6), 1, dst=md(4, 6)), {ARG_SRC: WIDE}, WIDE.softmax(1)),
    ),
    "batch_normalization": ("batch_normalization", batch_norm),
    "layer_normalization": ("layer_normalization", lambda: layer_norm(False)),
    "layer_normalization with statistics": ("layer_normalization", lambda: layer_norm(True)),
    "lrn across": (
        "lrn",
        lambda: (
            d.lrn("across_channels", md(2, 6, 7, 8), local_size=3, alpha=0.5, beta=0.75, k=2.0),
            {ARG_SRC: IMAGE},
            F.local_response_norm(IMAGE, 3, 0.5, 0.75, 2.0),
        ),
    ),
    "lrn within": (
        "lrn",
        lambda: (
            d.lrn("within_channel", md(2, 6, 7, 8), local_size=3, alpha=0.5, beta=0.75, k=2.0),
            {ARG_SRC: IMAGE},
            lrn_within(),
        ),
    ),
    **{f"reduction {k}": ("reduction", lambda k=k: reduction(k)) for k in d.REDUCTION},  # type: ignore[misc]
    **{f"resampling {k}": ("resampling", lambda k=k: resampling(k)) for k in d.RESAMPLING},  # type: ignore[misc]
    "prelu": (
        "prelu",
        lambda: (
            d.prelu(md(2, 6, 7, 8), md(1, 6, 1, 1)),
            {ARG_SRC: IMAGE, ARG_WEIGHTS: SLOPES},
            F.prelu(IMAGE, SLOPES.flatten()),
        ),
    ),
    **{f"rnn {kind}": ("rnn", lambda kind=kind: recurrent(kind)) for kind in GATES},  # type: ignore[misc]
    "shuffle": (
        "shuffle",
        lambda: (d.shuffle(md(2, 6, 7, 8), 1, 3), {ARG_SRC: IMAGE}, torch.nn.ChannelShuffle(3)(IMAGE)),
    ),
    "reorder": ("reorder", lambda: (OpDesc("reorder", None, {}), {ARG_SRC: WIDE}, WIDE)),
    **{
        f"embedding_bag {k} {w} {p}": ("embedding_bag", lambda k=k, w=w, p=p: embedding_bag(k, w, p))  # type: ignore[misc]
        for k, w, p in (("sum", False, -1), ("sum", True, 3), ("mean", False, 8), ("max", False, -1), ("max", False, 1))
    },
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_plain_operations(name: str) -> None:
    op, values, wanted = EXAMPLES[name][1]()
    assert op.kind == EXAMPLES[name][0]
    assert_close(expected(op, Attr(), values), wanted, dtype=torch.float64, k=1000)


def test_every_primitive_has_a_reference_and_an_example() -> None:
    assert reference._KINDS.keys() == d.KINDS.keys() == {kind for kind, _ in EXAMPLES.values()}
    with pytest.raises(NotImplementedError, match="no reference for lstm"):
        expected(OpDesc("lstm", None, {}), Attr(), {})


X = torch.linspace(-4, 4, 33, dtype=torch.float64)
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": lambda x: F.leaky_relu(x, 0.3),
    "pow": lambda x: 0.3 * x * x,
    "tanh": torch.tanh,
    "gelu_erf": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "elu": lambda x: F.elu(x, 0.3),
    "round": torch.round,
    "square": torch.square,
    "logsigmoid": lambda x: x.sigmoid().log(),
    "abs": torch.abs,
    "mish": lambda x: x * x.exp().log1p().tanh(),
    "sqrt": torch.sqrt,
    "hardswish": lambda x: x * (x + 3).clamp(0, 6) / 6,
    "linear": lambda x: 0.3 * x + 2,
    "bounded_relu": lambda x: x.relu().clamp_max(0.3),
    "soft_relu": lambda x: x.exp().log1p(),
    "logistic": lambda x: 1 / (1 + (-x).exp()),
    "exp": torch.exp,
    "gelu_tanh": torch.nn.GELU("tanh"),
    "swish": lambda x: x / (1 + (-0.3 * x).exp()),
    "log": torch.log,
    "clip": lambda x: x.clamp(0.3, 2),
    "clip_v2": lambda x: F.hardtanh(x, 0.3, 2),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_eltwise_functions(kind: str) -> None:
    op, attr = OpDesc("reorder", None, {}), Attr(PostOps().eltwise(kind, 0.3, 2.0, 0.5))
    assert_close(expected(op, attr, {ARG_SRC: X}), 0.5 * FUNCTIONS[kind](X), dtype=torch.float64, k=100)


def test_every_function_has_an_example() -> None:
    assert reference_post_ops.ELTWISE.keys() == attributes.ELTWISE.keys() == FUNCTIONS.keys()
    assert reference_post_ops.BINARY.keys() == attributes.BINARY.keys()


@pytest.mark.parametrize("dims", [(4, 6), (1, 6), (4, 1), (1, 1)])
@pytest.mark.parametrize("kind", attributes.BINARY)
def test_binary_post_ops_broadcast(kind: str, dims: tuple[int, int]) -> None:
    names = {"max": "maximum", "min": "minimum"}
    other = WIDE[: dims[0], : dims[1]].clone()
    attr = Attr(PostOps().binary(kind, md(*dims)))
    got = expected(OpDesc("reorder", None, {}), attr, {ARG_SRC: WIDE, arg_post_op(0): other})
    assert torch.equal(got, getattr(torch, names.get(kind, kind))(WIDE, other).double())


def test_chains_apply_in_order_and_read_what_dst_held() -> None:
    chain = PostOps().sum(2.0).prelu(2).sum(0.5).eltwise("square")
    slopes = noise(6)
    values = {ARG_SRC: WIDE, ARG_DST: OTHER, arg_post_op(1, ARG_WEIGHTS): slopes}
    wanted = (F.prelu(WIDE + 2 * OTHER, slopes) + 0.5 * OTHER) ** 2
    assert_close(expected(OpDesc("reorder", None, {}), Attr(chain), values), wanted, dtype=torch.float64)


def test_scales_and_zero_points() -> None:
    a, b, scale = torch.randint(-8, 8, (3, 4)).double(), torch.randint(-8, 8, (4, 6)).double(), noise(6)
    op = d.matmul(md(3, 4, dtype=S8), md(4, 6, dtype=S8), None, md(3, 6))
    output = Attr(output_scales="runtime", output_scales_mask=2, zero_points={ARG_SRC: 0, ARG_DST: 0})
    given = {ARG_SRC: a, ARG_WEIGHTS: b, ARG_ATTR_OUTPUT_SCALES: scale}
    zeros = {ARG_ATTR_ZERO_POINTS | ARG_SRC: torch.tensor([3.0]), ARG_ATTR_ZERO_POINTS | ARG_DST: torch.tensor([-2.0])}
    assert_close(expected(op, output, {**given, **zeros}), ((a - 3) @ b) * scale - 2, dtype=torch.float64)
    separate = Attr(scales={ARG_SRC: (0, F32), ARG_WEIGHTS: (2, F32)})
    values = {**given, ARG_ATTR_SCALES | ARG_SRC: torch.tensor([0.5]), ARG_ATTR_SCALES | ARG_WEIGHTS: scale}
    assert_close(expected(op, separate, values), 0.5 * (a @ b) * scale, dtype=torch.float64)
    assert_close(expected(op, Attr(output_scales=0.25), given), 0.25 * (a @ b), dtype=torch.float64)


def test_depthwise_post_op() -> None:
    weights, depthwise, bias = noise(5, 6, 1, 1), noise(5, 1, 1, 3, 3), noise(5)
    op = d.convolution(md(2, 6, 7, 8), md(5, 6, 1, 1), None, md(2, 5, 7, 8))
    values = {ARG_SRC: IMAGE, ARG_WEIGHTS: weights}
    values |= {ARG_ATTR_POST_OP_DW | ARG_WEIGHTS: depthwise, ARG_ATTR_POST_OP_DW | ARG_BIAS: bias}
    wanted = F.conv2d(F.conv2d(IMAGE, weights), depthwise[:, 0], bias, 2, 1, groups=5)
    got = expected(op, Attr(PostOps().depthwise(kernel=3, stride=2, padding=1)), values)
    assert_close(got, wanted, dtype=torch.float64, k=100)
