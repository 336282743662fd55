"""Every spelling of an operation becomes the one of the vocabulary; what has no exact equal stays."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fx_passes import ops
from fx_passes.normalize import normalize
from fx_passes.pipeline import compile_graph
from fx_passes.spellings.registry import FIRST_RESULT, FUNCTIONS, METHODS, MODULES, OVERLOADS
from tests.support.graphs import (
    after,
    calls,
    check,
    check_equal,
    check_twice,
    count,
    image,
    model_of,
    name_of,
    outside,
    post_ops,
)
from tests.support.quantized import through

LINE, PLANE, SPACE = (2, 4, 9), (2, 4, 9, 7), (2, 4, 5, 6, 7)

# module type -> (module, shape of its input, the operations it becomes; None: it disappears)
MODULE_EXAMPLES: dict[type[nn.Module], tuple[nn.Module, tuple[int, ...], str | tuple[str, ...] | None]] = {
    nn.Conv1d: (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), LINE, "convolution"),
    nn.Conv2d: (nn.Conv2d(4, 6, (3, 4), padding="same", dilation=(1, 2)), PLANE, "convolution"),
    nn.Conv3d: (nn.Conv3d(4, 2, 3, bias=False, padding=(1, 0, 2)), SPACE, "convolution"),
    nn.ConvTranspose1d: (nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), LINE, "deconvolution"),
    nn.ConvTranspose2d: (nn.ConvTranspose2d(4, 6, 3, groups=2, dilation=2), PLANE, "deconvolution"),
    nn.ConvTranspose3d: (nn.ConvTranspose3d(4, 2, 2, padding=1), SPACE, "deconvolution"),
    nn.Linear: (nn.Linear(7, 5), PLANE, "linear"),
    nn.modules.linear.NonDynamicallyQuantizableLinear: (
        nn.modules.linear.NonDynamicallyQuantizableLinear(7, 5),
        PLANE,
        "linear",
    ),
    nn.BatchNorm1d: (nn.BatchNorm1d(4), LINE, "batch_norm"),
    nn.BatchNorm2d: (nn.BatchNorm2d(4, eps=0.01), PLANE, "batch_norm"),
    nn.BatchNorm3d: (nn.BatchNorm3d(4, affine=False), SPACE, "batch_norm"),
    nn.SyncBatchNorm: (nn.SyncBatchNorm(4), PLANE, "batch_norm"),
    nn.LayerNorm: (nn.LayerNorm((9, 7)), PLANE, "layer_norm"),
    nn.GroupNorm: (nn.GroupNorm(2, 4), PLANE, "group_norm"),
    nn.RMSNorm: (nn.RMSNorm(7), PLANE, "rms_norm"),
    nn.MaxPool1d: (nn.MaxPool1d(3), LINE, "pool"),
    nn.MaxPool2d: (nn.MaxPool2d(3, 2, 1, dilation=(1, 2), ceil_mode=True), PLANE, "pool"),
    nn.MaxPool3d: (nn.MaxPool3d((1, 2, 3)), SPACE, "pool"),
    nn.AvgPool1d: (nn.AvgPool1d(3, padding=1), LINE, "pool"),
    nn.AvgPool2d: (nn.AvgPool2d(3, 2, padding=1, ceil_mode=True, count_include_pad=False), PLANE, "pool"),
    nn.AvgPool3d: (nn.AvgPool3d(2, ceil_mode=True), SPACE, "pool"),
    nn.AdaptiveAvgPool1d: (nn.AdaptiveAvgPool1d(4), LINE, "adaptive_pool"),
    nn.AdaptiveAvgPool2d: (nn.AdaptiveAvgPool2d((None, 3)), PLANE, "adaptive_pool"),
    nn.AdaptiveAvgPool3d: (nn.AdaptiveAvgPool3d(1), SPACE, "adaptive_pool"),
    nn.AdaptiveMaxPool1d: (nn.AdaptiveMaxPool1d(2), LINE, "adaptive_pool"),
    nn.AdaptiveMaxPool2d: (nn.AdaptiveMaxPool2d(2), PLANE, "adaptive_pool"),
    nn.AdaptiveMaxPool3d: (nn.AdaptiveMaxPool3d((2, 1, None)), SPACE, "adaptive_pool"),
    nn.ReLU: (nn.ReLU(), PLANE, "eltwise"),
    nn.ReLU6: (nn.ReLU6(), PLANE, "eltwise"),
    nn.LeakyReLU: (nn.LeakyReLU(0.3), PLANE, "eltwise"),
    nn.ELU: (nn.ELU(0.5), PLANE, "eltwise"),
    nn.Hardtanh: (nn.Hardtanh(-0.5, 0.7), PLANE, "eltwise"),
    nn.GELU: (nn.GELU("tanh"), PLANE, "eltwise"),
    nn.SiLU: (nn.SiLU(), PLANE, "eltwise"),
    nn.Sigmoid: (nn.Sigmoid(), PLANE, "eltwise"),
    nn.Tanh: (nn.Tanh(), PLANE, "eltwise"),
    nn.Hardswish: (nn.Hardswish(), PLANE, "eltwise"),
    nn.Hardsigmoid: (nn.Hardsigmoid(), PLANE, "eltwise"),
    nn.Mish: (nn.Mish(), PLANE, "eltwise"),
    nn.SELU: (nn.SELU(), PLANE, "eltwise"),
    nn.Softsign: (nn.Softsign(), PLANE, "eltwise"),
    nn.Softplus: (nn.Softplus(), PLANE, "eltwise"),
    nn.PReLU: (nn.PReLU(4), PLANE, "prelu"),
    nn.GLU: (nn.GLU(1), PLANE, ("chunk", "eltwise", "binary")),
    nn.Softmax: (nn.Softmax(1), PLANE, "softmax"),
    nn.LogSoftmax: (nn.LogSoftmax(-1), PLANE, "softmax"),
    nn.Flatten: (nn.Flatten(1, 2), PLANE, "flatten"),
    nn.Unflatten: (nn.Unflatten(1, (1, -1)), PLANE, "unflatten"),
    nn.ZeroPad1d: (nn.ZeroPad1d(1), LINE, "pad"),
    nn.ZeroPad2d: (nn.ZeroPad2d((1, 0, 2, 3)), PLANE, "pad"),
    nn.ZeroPad3d: (nn.ZeroPad3d(1), SPACE, "pad"),
    nn.ConstantPad1d: (nn.ConstantPad1d(1, 2.0), LINE, "pad"),
    nn.ConstantPad2d: (nn.ConstantPad2d(1, 2.0), PLANE, "pad"),
    nn.ConstantPad3d: (nn.ConstantPad3d(1, 2.0), SPACE, "pad"),
    nn.Upsample: (nn.Upsample(scale_factor=2), PLANE, "resample"),
    nn.UpsamplingNearest2d: (nn.UpsamplingNearest2d(scale_factor=3), PLANE, "resample"),
    nn.EmbeddingBag: (nn.EmbeddingBag(5, 3), (2, 4), "embedding_bag"),
    nn.Identity: (nn.Identity(), PLANE, None),
    nn.Dropout: (nn.Dropout(), PLANE, None),
    nn.Dropout1d: (nn.Dropout1d(), LINE, None),
    nn.Dropout2d: (nn.Dropout2d(inplace=True), PLANE, None),
    nn.Dropout3d: (nn.Dropout3d(), SPACE, None),
    nn.AlphaDropout: (nn.AlphaDropout(), PLANE, None),
    nn.FeatureAlphaDropout: (nn.FeatureAlphaDropout(), PLANE, None),
}


def test_every_module_row_has_an_example() -> None:
    assert MODULE_EXAMPLES.keys() == MODULES.keys()


@pytest.mark.parametrize("kind", MODULE_EXAMPLES, ids=lambda kind: kind.__name__)
def test_module(kind: type[nn.Module]) -> None:
    module, shape, operation = MODULE_EXAMPLES[kind]
    assert type(module) is kind
    model = model_of(lambda m, x: m.layer(x).tanh(), layer=module)
    check(model, image(*shape) if kind is not nn.EmbeddingBag else torch.tensor([[0, 3], [1, 1]]))
    gm = after("normalize", model)
    became = [operation] if isinstance(operation, str) else [*(operation or ())]
    assert count(gm) == Counter(["eltwise", *became])
    check_twice(gm, normalize)
    sources = [node.meta["source"] for node in calls(gm)]
    layer = [] if operation is None else [f"{kind.__name__} layer"]
    assert [*dict.fromkeys(sources)] == [*layer, "Tensor.tanh"]


K = {"c": nn.Conv2d(4, 4, 3), "n": nn.BatchNorm2d(4), "l": nn.Linear(7, 5)}

# Spellings other than modules -> (forward over m.c, m.n, m.l; the operations it becomes)
SPELLINGS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "F.conv2d": (lambda m, x: F.conv2d(x, m.c.weight, m.c.bias, 2, (1, 0)), ("convolution",)),
    "F.conv2d by name": (lambda m, x: F.conv2d(input=x, weight=m.c.weight, dilation=2), ("convolution",)),
    "F.conv2d valid": (lambda m, x: F.conv2d(x, m.c.weight, padding="valid"), ("convolution",)),
    "F.conv2d same": (lambda m, x: F.conv2d(x, m.c.weight, m.c.bias, padding="same", dilation=2), ("convolution",)),
    "torch.conv2d": (lambda m, x: torch.conv2d(x, m.c.weight), ("convolution",)),
    "F.conv_transpose2d": (lambda m, x: F.conv_transpose2d(x, m.c.weight, None, 2, 1, 1), ("deconvolution",)),
    "F.linear": (lambda m, x: F.linear(x, m.l.weight), ("linear",)),
    "F.batch_norm": (
        lambda m, x: F.batch_norm(x, m.n.running_mean, m.n.running_var, m.n.weight, eps=0.1),
        ("batch_norm",),
    ),
    "F.layer_norm": (lambda m, x: F.layer_norm(x, (7,), eps=0.1), ("layer_norm",)),
    "x @ y": (lambda m, x: x @ x.transpose(-1, -2), ("transpose", "matmul")),
    "torch.matmul": (lambda m, x: torch.matmul(x, m.l.weight.t()) + 0 * m.c(x).sum(), ("*", "matmul")),
    "torch.bmm": (lambda m, x: torch.bmm(x[0], x[1].transpose(1, 2)), ("*", "matmul")),
    "einsum": (lambda m, x: torch.einsum("bchw,bcvw->bchv", x, x.relu()), ("eltwise", "transpose", "matmul")),
    "einsum, transposed": (lambda m, x: torch.einsum("ab,bc->ac", x[0, 0], m.l.weight.T), ("index", "*", "matmul")),
    "einsum of heads": (
        lambda m, x: torch.einsum("bqhd,bkhd->bhqk", x, x.relu()),
        ("eltwise", "permute", "permute", "matmul"),
    ),
    "einsum, operands listed": (
        lambda m, x: torch.einsum("bhij, bjhd -> bihd", [x @ x.transpose(-1, -2), x.permute(0, 2, 1, 3)]),
        ("transpose", "matmul", "permute", "permute", "matmul", "permute", "contiguous"),
    ),
    "einsum, the second's rows": (lambda m, x: torch.einsum("bcij,bcik->bckj", x, x), ("*", "transpose")),
    "einsum, columns first": (lambda m, x: torch.einsum("ab,bc->ca", x[0, 0], m.l.weight.T), ("*", "transpose")),
    "x.relu()": (lambda m, x: x.relu(), ("eltwise",)),
    "F.relu6": (lambda m, x: F.relu6(x), ("eltwise",)),
    "torch.clamp": (lambda m, x: torch.clamp(x, min=-1, max=1), ("eltwise",)),
    "clamp from 0": (lambda m, x: x.clamp(min=0), ("eltwise",)),
    "F.gelu": (lambda m, x: F.gelu(x, approximate="tanh"), ("eltwise",)),
    "F.leaky_relu": (lambda m, x: F.leaky_relu(x), ("eltwise",)),
    "x ** 2": (lambda m, x: x.tanh() ** 2, ("eltwise", "eltwise")),
    "torch.pow": (lambda m, x: torch.pow(x.abs(), 0.5), ("eltwise", "eltwise")),
    "-x": (lambda m, x: -x.exp(), ("eltwise", "binary")),
    "number - x": (lambda m, x: 1 - x.sigmoid(), ("eltwise", "binary")),
    "torch.rsub": (lambda m, x: torch.rsub(x, 1), ("binary",)),
    "x.mul": (lambda m, x: x.mul(0.5), ("binary",)),
    "torch.div": (lambda m, x: torch.div(x, x.abs()), ("eltwise", "binary")),
    "torch.minimum": (lambda m, x: torch.minimum(x, -x.relu()), ("eltwise", "binary", "binary")),
    "F.prelu": (lambda m, x: F.prelu(x, m.n.weight), ("prelu",)),
    "F.max_pool2d": (lambda m, x: F.max_pool2d(x, 2), ("pool",)),
    "F.avg_pool2d": (lambda m, x: F.avg_pool2d(x, 3, stride=2, padding=1), ("pool",)),
    "F.adaptive_avg_pool2d": (lambda m, x: F.adaptive_avg_pool2d(x, (2, None)), ("adaptive_pool",)),
    "x.mean": (lambda m, x: x.mean([2, 3]), ("reduce",)),
    "torch.mean": (lambda m, x: torch.mean(x, dim=-1, keepdim=True), ("reduce",)),
    "torch.amax": (lambda m, x: torch.amax(x, (1, 2)), ("reduce",)),
    "x.norm": (lambda m, x: x.norm(p=2, dim=(2, 3), keepdim=True), ("reduce",)),
    "torch.norm": (lambda m, x: torch.norm(x, dim=1), ("reduce",)),
    "torch.norm, Frobenius": (lambda m, x: torch.norm(x, "fro", [1, -1]), ("reduce",)),
    "torch.linalg.vector_norm": (lambda m, x: torch.linalg.vector_norm(x, dim=(0, 2), keepdim=True), ("reduce",)),
    "torch.addcmul": (lambda m, x: torch.addcmul(x, x.relu(), x.abs()), ("eltwise", "eltwise", "binary", "binary")),
    "x.addcmul": (lambda m, x: x.relu().addcmul(x, x, value=1.0), ("eltwise", "binary", "binary")),
    "x.roll": (lambda m, x: x.relu().roll((1, -2), (2, 3)), ("eltwise", "roll")),
    "F.softmax": (lambda m, x: F.softmax(x, dim=1), ("softmax",)),
    "x.log_softmax": (lambda m, x: x.log_softmax(-1), ("softmax",)),
    "torch.cat": (lambda m, x: torch.cat([x, x], 1), ("concat",)),
    "torch.concat": (lambda m, x: torch.concat((x, x), dim=-1), ("concat",)),
    "torch.concatenate": (lambda m, x: torch.concatenate((x, x), dim=-1), ("concat",)),
    "torch.absolute": (lambda m, x: torch.absolute(x), ("eltwise",)),
    "x.negative": (lambda m, x: x.exp().negative(), ("eltwise", "binary")),
    "torch.special.expit": (lambda m, x: torch.special.expit(x), ("eltwise",)),
    "torch.special.softmax": (lambda m, x: torch.special.softmax(x, 1), ("softmax",)),
    "x.view": (lambda m, x: x.view(2, -1), ("reshape",)),
    "x.reshape of sizes": (lambda m, x: x.reshape(x.size(0), x.shape[1] * 9, -1), ("size", "size", "*", "reshape")),
    "torch.unflatten": (lambda m, x: torch.unflatten(x, -1, (1, x.shape[3])), ("size", "unflatten")),
    "x.reshape_as()": (lambda m, x: x.flatten(1).reshape_as(x), ("flatten", "reshape_as")),
    "x.reshape(x.shape)": (lambda m, x: x.flatten(1).reshape(x.shape), ("flatten", "reshape_as")),
    "x.view(x.size())": (lambda m, x: x.flatten(1).view(x.size()), ("flatten", "reshape_as")),
    "x.view_as()": (lambda m, x: x.flatten(1).view_as(x), ("flatten", "reshape_as")),
    "x.unflatten()": (lambda m, x: x.unflatten(1, [-1, 1]), ("unflatten",)),
    "torch.flatten": (lambda m, x: torch.flatten(x, 1), ("flatten",)),
    "x.permute": (lambda m, x: x.permute(0, 2, 3, 1), ("permute",)),
    "torch.permute": (lambda m, x: torch.permute(x, [0, 2, 3, 1]), ("permute",)),
    "x.movedim": (lambda m, x: x.permute(0, 2, 3, 1).movedim(-1, 1), ("permute", "permute")),
    "torch.moveaxis": (lambda m, x: torch.moveaxis(x.permute(0, 2, 3, 1), (3, 0), (0, -1)), ("permute", "permute")),
    "x.chunk": (lambda m, x: x.chunk(2, dim=1)[0].relu(), ("chunk", "eltwise")),
    "torch.split": (lambda m, x: torch.split(x, [1, 3], 1)[1] * 2, ("split", "binary")),
    "x.unbind": (lambda m, x: x.unbind(1)[2].relu(), ("index", "eltwise")),
    "torch.unbind": (lambda m, x: torch.unbind(x, dim=2)[0] * torch.unbind(x, 2)[-1], ("index", "index", "binary")),
    "x.unsqueeze": (lambda m, x: x.unsqueeze(1), ("unsqueeze",)),
    "x.expand": (lambda m, x: x[:, :1].expand(-1, 3, -1, -1), ("index", "expand")),
    "x.dim()": (lambda m, x: x.flatten(1).reshape((1,) * 1 + (-1, 2)), ("flatten", "reshape")),
    "F.dropout": (lambda m, x: F.dropout(x, training=False).relu(), ("eltwise",)),
    "attention": (lambda m, x: F.scaled_dot_product_attention(x, x, x), ("attention",)),
    "torch.add": (lambda m, x: torch.add(x, x.relu()), ("eltwise", "binary")),
    "operator.add": (lambda m, x: operator.add(x.relu(), 1), ("eltwise", "binary")),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling(spelling: str) -> None:
    function, operations = SPELLINGS[spelling]
    model = model_of(function, **K)
    check(model, image(*PLANE))
    gm = after("normalize", model)
    names = [name_of(n) for n in calls(gm) if name_of(n) != "getitem" and (n.op != "call_module")]
    if "*" in operations:  # other nodes are none of this test's business
        assert operations[-1] in names
    else:
        assert names == list(operations)
    check_twice(gm, normalize)


@pytest.mark.parametrize(
    "function",
    (
        lambda m, x: x.norm(),
        lambda m, x: x.norm(1, 2),
        lambda m, x: x.norm(math.inf, 2),
        lambda m, x: torch.linalg.vector_norm(x, 3, (1, 2)),
        lambda m, x: torch.linalg.vector_norm(x, 2, 1, dtype=torch.float64),
        lambda m, x: torch.addcmul(x, x, x, value=2),
        lambda m, x: x.addcmul(x, x, value=-1.0),
    ),
)
def test_other_norms_and_sums_with_products_stay(function: Any) -> None:
    model = model_of(function)
    check(model, image(*PLANE))
    assert not {name_of(node) for node in calls(after("normalize", model))} & {"reduce", "binary"}


@pytest.mark.parametrize(
    "equation",
    ("bchw,bchw->bch", "bchw,bchw->bchw", "bcxw,bcyw", "bchw,bchw->b", "bchw,bcvw->bhw", "bchw,xyzt->bchwxyzt"),
)
def test_other_sums_of_products_stay(equation: str) -> None:
    """What sums over no label, sums one operand alone, or has no label of one operand alone, is no matrix product."""
    model = model_of(lambda m, x: torch.einsum(equation, x, x.relu()))
    gm = check(model, image(*PLANE))
    assert outside(gm)["einsum"] == 1


@pytest.mark.parametrize(
    "equation",
    (
        "bchw,bcvw->bhv",  # summed over two
        "bchw,bdhw->bcd",
        "bchw,dehw->bcde",  # two of each operand alone
        "bchw,dehw->edbc",
        "bchw,bcvw->bcvh",
        "bhwc,hkmc->bhwkm",  # relative positions: h is common, two of each alone
        "bhwc,hkmc->mwhbk",
    ),
)
def test_labels_that_are_several_join_in_one_product(equation: str) -> None:
    model = model_of(lambda m, x: torch.einsum(equation, x, x.relu().flip(1)))
    gm = check(model, torch.randn(5, 5, 5, 5))
    assert "einsum" not in outside(gm)
    products = [node for region in gm.regions().values() for node in region.graph.nodes if node.target is ops.matmul]
    assert len(products) == 1


@pytest.mark.parametrize("samples", (1, 2))
@pytest.mark.parametrize(
    "equation", ("bchw,cd->bdhw", "bchw,dc->bhwd", "bchw,cd->hbdw", "bchw,cd->dbwh", "bchw,cd->wdbh")
)
def test_sums_of_products_can_be_viewed_as_eagers_can(equation: str, samples: int) -> None:
    """PyTorch multiplies in an order that depends on sizes: a result that is contiguous there is so here."""
    model = model_of(lambda m, x, y: torch.einsum(equation, x, y))
    x, y = image(samples, 4, 5, 3), image(4, 4, seed=1)
    gm = check(model, x, y)
    assert "einsum" not in outside(gm)
    assert gm(x, y).is_contiguous() >= model(x, y).is_contiguous()


@pytest.mark.parametrize("exported", (False, True))
@pytest.mark.parametrize(
    ("function", "left"),
    (
        (lambda x, gate: x * gate.expand_as(x), 0),
        (lambda x, gate: gate.expand_as(x).mul(x), 0),
        (lambda x, gate: x.relu().sigmoid() * gate.expand_as(x), 0),
        (lambda x, gate: x.mean(1, keepdim=True) * gate.expand_as(x), 1),
        (lambda x, gate: torch.sub(x, gate.expand_as(x)), 0),
        (lambda x, gate: torch.sub(x, gate.expand_as(x), alpha=2), 1),
        (lambda x, gate: x[:, :, 1:] * gate.expand_as(x)[:, :, 1:], 1),
        (lambda x, gate: (x * gate.expand_as(x), gate.expand_as(x) * 2), 1),
        (lambda x, gate: x * gate.sum().expand_as(x), 1),
    ),
)
def test_gates_expanded_to_what_they_multiply(function: Any, left: int, exported: bool) -> None:
    """Broadcasting does it, where nobody else sees the expanded gates."""
    model = model_of(lambda m, x: function(x.relu(), m.c(x).mean((2, 3)).view(2, 4, 1, 1)), c=nn.Conv2d(4, 4, 3))
    gm = compile_graph(model, (image(2, 4, 9, 7),) if exported else None)
    check_equal(model, gm, image(2, 4, 9, 7))
    assert sum(many for name, many in count(gm).items() if name.startswith("expand_as")) == left


def test_gates_of_an_activation_in_place() -> None:
    """As of timm's ECA networks. What is expanded was taken for memory of what is only asked for its shape."""

    def gated(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.act(m.c(x))
        gate: torch.Tensor = x.mean((2, 3)).view(x.shape[0], 1, -1).sigmoid()
        return m.d(x * gate.view(x.shape[0], -1, 1, 1).expand_as(x))

    model = model_of(gated, c=nn.Conv2d(4, 4, 3), act=nn.SiLU(inplace=True), d=nn.Conv2d(4, 4, 1))
    gm = check(model, image(2, 4, 9, 7))
    assert len(gm.regions()) == 1 and not outside(gm)


@pytest.mark.parametrize("exported", (False, True))
@pytest.mark.parametrize(
    ("function", "left"),
    (
        (lambda x, gate: through(x, 0.02, 3) * through(gate.expand_as(x), 0.01, 7), 0),
        (lambda x, gate: x * through(through(gate.expand_as(x), 0.01, 7), 0.02, 3), 0),
        (lambda x, gate: (x * (rounded := through(gate.expand_as(x), 0.01, 7)), rounded), 1),
        (lambda x, gate: through(x.mean(1, keepdim=True), 0.02, 3) * through(gate.expand_as(x), 0.01, 7), 1),
    ),
)
def test_gates_that_are_expanded_and_rounded(function: Any, left: int, exported: bool) -> None:
    """They are rounded as they are: in a quantized graph broadcasting expands them, too."""
    model = model_of(lambda m, x: function(m.c(x), m.c(x).mean((2, 3)).view(2, 4, 1, 1)), c=nn.Conv2d(4, 4, 3)).float()
    x = image(2, 4, 9, 7).float()
    gm = compile_graph(model, (x,) if exported else None)
    check_equal(model, gm, x)
    assert sum(many for name, many in count(gm).items() if name.startswith("expand_as")) == left


def test_tables_agree_on_signatures() -> None:
    """A builder is called the way the original is: every function and method binds at least its first argument."""
    assert all(callable(row) for table in (FUNCTIONS, METHODS, OVERLOADS, FIRST_RESULT) for row in table.values())


class OwnConv(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def test_a_subclass_with_a_forward_of_its_own_is_traced() -> None:
    gm = check(model_of(lambda m, x: m.layer(x), layer=OwnConv(4, 4, 3)), image(*PLANE))
    assert post_ops(gm) == [("eltwise:linear",)]


def _hooked() -> nn.Module:
    conv = nn.Conv2d(4, 4, 3)
    conv.register_forward_hook(lambda module, args, result: result * 3)
    return conv


def _patched() -> nn.Module:
    conv = nn.Conv2d(4, 4, 3)
    conv.forward = lambda x: x * 2  # type: ignore[method-assign]
    return conv


REFUSED_MODULES: dict[str, Callable[[], nn.Module]] = {
    "forward hook": _hooked,
    "forward replaced": _patched,
    "padding_mode": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    "returns indices": lambda: nn.MaxPool2d(2, return_indices=True),
    "divisor": lambda: nn.AvgPool2d(2, divisor_override=3),
    "softplus beta": lambda: nn.Softplus(beta=2),
    "batch statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "softmax over an unstated dimension": lambda: nn.Softmax(),
}


@pytest.mark.parametrize("why", REFUSED_MODULES)
@pytest.mark.filterwarnings("ignore")
def test_module_stays(why: str) -> None:
    model = model_of(lambda m, x: m.layer(x), layer=REFUSED_MODULES[why]())
    gm = check(model, image(*PLANE))
    assert "convolution" not in count(gm) and sum(outside(gm).values()) >= 1


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags(mode: str) -> None:
    indices, offsets = torch.tensor([0, 3, 3, 1, 4]), torch.tensor([0, 2, 5])

    def forward(m: Any, i: torch.Tensor, o: torch.Tensor) -> Any:
        weights = m.t.weight.mean(1)[i] if mode == "sum" else None
        one = F.embedding_bag(i, m.t.weight, o, mode=mode, include_last_offset=True, padding_idx=1)
        return torch.cat([one, m.t(i, o[:2], weights), F.embedding_bag(i.reshape(1, 5), m.t.weight).expand(2, 3)], 1)

    model = model_of(forward, t=nn.EmbeddingBag(5, 3, mode=mode))
    gm = check(model, indices, offsets)
    assert count(gm)["embedding_bag"] == 3 and count(gm)["t"] == 0
    exported = compile_graph(model, (indices, offsets))
    check_equal(model, exported, indices, offsets)


def test_a_module_given_an_argument_by_name_behind_one_left_out() -> None:
    model = model_of(lambda m, i, weights: m.t(i, per_sample_weights=weights), t=nn.EmbeddingBag(5, 3, mode="sum"))
    i, weights = torch.tensor([[0, 3, 1], [4, 1, 1]]), image(2, 3)
    assert count(check(model, i, weights))["embedding_bag"] == 1


def test_a_table_that_is_renormalized_stays() -> None:
    model = model_of(lambda m, i: m.t(i), t=nn.EmbeddingBag(5, 3, max_norm=0.1))
    assert outside(check(model, torch.tensor([[0, 3], [1, 1]]))) == {"t": 1}


def test_slices_by_sizes() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.c(x)
        return (y + m.p[: y.shape[3]])[:, : y.size(1) - 1].relu()

    model = model_of(forward, c=nn.Conv2d(4, 4, 1))
    model.p = nn.Parameter(image(20))
    gm = check(model, image(*PLANE))
    assert outside(gm) == {} and len(gm.regions()) == 1
    check_equal(model, gm, image(1, 4, 2, 11))


@pytest.mark.parametrize("exported", (False, True))
def test_the_smaller_of_two_sizes_cuts_no_region(exported: bool) -> None:
    """As SEW has it: what two layers leave of a row, cut to the shorter of both, and shaped by that length."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        first, second = m.a(x), m.b(x)
        length = torch.sym_min(first.shape[-1], second.shape[-1])
        both = first[..., :length] + second[..., :length]
        return m.l(both.reshape(-1, 4, length).transpose(1, 2).reshape(-1, length, 2, 2).flatten(2))

    model = model_of(forward, a=nn.Conv1d(3, 4, 2, 2), b=nn.Conv1d(3, 4, 3, 2), l=nn.Linear(4, 5))
    gm = compile_graph(model, (image(2, 3, 12),) if exported else None)
    assert outside(gm) == {} and len(gm.regions()) == 1
    for width in (12, 13):
        check_equal(model, gm, image(2, 3, width))


@pytest.mark.parametrize("cut", (lambda x, n: x[:, n:], lambda x, n: x[1:, :-n], lambda x, n: x[..., n - 1 : n + 2]))
def test_exported_slices_by_sizes(cut: Any) -> None:
    model = model_of(lambda m, x, y: cut(m.l(x), y.shape[0]).relu() * 2, l=nn.Linear(7, 9))
    gm = compile_graph(model, (image(6, 7), image(3)))
    assert len(gm.regions()) == 1 and outside(gm) == {}
    for first, second in ((6, 3), (5, 4)):
        check_equal(model, gm, image(first, 7), image(second))


@pytest.mark.parametrize("dim", (1, -1))
@pytest.mark.parametrize("exported", (False, True))
def test_gated_linear_units(dim: int, exported: bool) -> None:
    model = model_of(
        lambda m, x: m.d(F.glu(m.c(x), dim)), c=nn.Conv1d(3, 8, 1), d=nn.Conv1d(4 if dim == 1 else 8, 2, 1)
    )
    gm = compile_graph(model, (image(2, 3, 6),) if exported else None)
    check_equal(model, gm, image(2, 3, 6))
    assert len(gm.regions()) == 1 and outside(gm) == {}


def test_a_gated_linear_unit_of_halves_that_are_not_alike() -> None:
    """Of three channels eager PyTorch makes none; two and one would broadcast."""
    gm = compile_graph(model_of(lambda m, x: F.glu(m.c(x), 1), c=nn.Conv1d(3, 3, 1)))
    with pytest.raises(RuntimeError):
        gm(image(2, 3, 6))


@pytest.mark.parametrize("dim", (0, 2, -1, -3))
def test_pieces_of_unbind_are_slices(dim: int) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        first, second = x.unbind(dim)
        return first * second, x.unbind(dim)

    gm = check(model_of(forward), image(2, 2, 2))
    assert count(gm)["index"] == 2 and [n.target for n in gm.graph.nodes if n.op == "call_method"] == ["unbind"]


def test_pieces_of_unbind_that_are_written_to() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        first, second = y.unbind(0)
        first.add_(1)
        return y + second

    check(model_of(forward), image(2, 3))


def test_known_modules_outside_of_the_vocabulary_return_tensors() -> None:
    gm = check(model_of(lambda m, x: m.g(x) + m.g(-x) * 2, g=nn.InstanceNorm2d(4)), image(*PLANE))
    assert outside(gm)["g"] == 2 and count(gm)["binary"] >= 2


REFUSED_CALLS: dict[str, Callable[..., Any]] = {
    "alpha": lambda m, x: torch.add(x, x, alpha=3),
    "rounding": lambda m, x: torch.div(x, 2, rounding_mode="trunc"),
    "one limit": lambda m, x: x.clamp(max=1),
    "min greater than max": lambda m, x: x.clamp(1, -1),
    "a tensor for a limit": lambda m, x: x.clamp(x * 0, x * 0 + 1),
    "dtype": lambda m, x: F.softmax(x, -1, dtype=torch.float32),
    "mean of everything": lambda m, x: x.mean(),
    "maximum with indices": lambda m, x: x.max(1),
    "viewed as another dtype": lambda m, x: x.view(torch.int64),
    "a boolean mask": lambda m, x: x[x > 0],
    "another elu": lambda m, x: torch.celu(x),
    "training dropout": lambda m, x: F.dropout(x, 0.0, training=True),
}


@pytest.mark.parametrize("why", REFUSED_CALLS)
def test_call_stays(why: str) -> None:
    gm = check(model_of(REFUSED_CALLS[why]), image(*PLANE))
    assert not gm.regions() or why in ("a tensor for a limit",)


def test_numbers_are_not_taken_for_tensors() -> None:
    model = model_of(lambda m, x, n: (x.reshape(n + 1, -1).relu(), n * 2, n - 1))
    gm = check(model, image(*PLANE), 3)
    assert gm(image(*PLANE), 1)[1:] == (2, 0)


def test_a_module_called_twice_and_tied_modules() -> None:
    shared = nn.Conv2d(4, 4, 1)
    gm = check(model_of(lambda m, x: m.b(m.a(m.a(x))), a=shared, b=shared), image(*PLANE))
    assert count(gm) == {"convolution": 3}
    (region,) = gm.regions().values()
    assert [n.target for n in region.graph.find_nodes(op="get_attr")] == ["a.weight", "a.bias"]


def test_attention_module_is_written_out() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(2, -1, 8)
        y, _ = m.a(x, x, x, need_weights=False)
        return x + y

    gm = check(model_of(forward, a=attention), image(2, 5, 8))
    assert count(gm)["attention"] == 1 and count(gm)["linear"] == 2
    assert outside(gm) == {"reshape": 1}  # of the input: a view


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_attention_between_two_sequences(batch_first: bool, bias: bool) -> None:
    attention = nn.MultiheadAttention(8, 2, bias=bias, batch_first=batch_first)

    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = x.permute(0, 1, 2), y.permute(0, 1, 2)
        return m.a(x, y, y)[0]

    gm = check(model_of(forward, a=attention), image(3, 3, 8), image(3, 3, 8, seed=1))
    assert count(gm)["attention"] == 1 and count(gm)["linear"] == 4


ATTENTION_REFUSED = {
    "the weights are read": lambda m, x: m.a(x, x, x),
    "a mask": lambda m, x: m.a(x, x, x, attn_mask=m.mask)[0],
    "rank unknown": lambda m, x: m.a(x, x, x)[0],
}


@pytest.mark.parametrize("why", ATTENTION_REFUSED)
def test_attention_stays(why: str) -> None:
    function = ATTENTION_REFUSED[why]

    def forward(m: Any, x: torch.Tensor) -> Any:
        return function(m, x if why == "rank unknown" else x.permute(0, 1, 2))

    model = model_of(forward, a=nn.MultiheadAttention(8, 2, batch_first=True))
    model.register_buffer("mask", torch.zeros(5, 5, dtype=torch.float64))
    gm = check(model, image(2, 5, 8))
    assert count(gm)["attention"] == 0
    if why == "rank unknown":
        check_equal(model, gm, image(5, 8))


def test_an_operator_without_an_overload_is_its_only_one() -> None:
    model = model_of(lambda m, x: torch.ops.aten.reshape(torch.ops.aten.relu(x), [-1]))
    targets = [node.target for node in normalize(fx.symbolic_trace(model)).graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.aten.relu, ops.reshape]  # relu has another, which writes where it is told


@pytest.mark.parametrize("kernel", [1, (2, 3), 4])
def test_exported_convolutions_that_keep_sizes(kernel: Any) -> None:
    """torch.export leaves padding="same" to the operator, as EfficientNets of Hugging Face have it."""
    layers = nn.Conv2d(3, 6, kernel, padding="same"), nn.ReLU(), nn.Conv2d(6, 5, 3, padding="valid")
    exported = torch.export.export(nn.Sequential(*layers).double().eval(), (image(),)).module()
    check(exported, image())
    assert count(after("normalize", exported, (image(),))) == {"convolution": 2, "eltwise": 1}


@pytest.mark.parametrize(
    ("weight", "stride"),
    [
        pytest.param(lambda m, x: m.c.weight * x.mean(), 1, id="a weight made in the call"),
        pytest.param(lambda m, x: m.c.weight, 2, id="a stride that PyTorch refuses"),
    ],
)
def test_sizes_that_are_not_known_stay(weight: Any, stride: int) -> None:
    gm = fx.symbolic_trace(model_of(lambda m, x: F.conv2d(x, weight(m, x), None, stride, "same"), c=nn.Conv2d(4, 6, 3)))
    assert "convolution" not in count(normalize(gm))


class TakesZeros(nn.Module):
    """A recurrent network whose first states are zeros, perhaps with ones written into them."""

    def __init__(self, kind: type[nn.Module], written: bool) -> None:
        super().__init__()
        self.r, self.written = kind(7, 4), written
        self.double().eval()

    def forward(self, x: torch.Tensor) -> Any:
        sizes = (x.shape[0], 4) if isinstance(self.r, nn.RNNCellBase) else (1, x.shape[1], 4)
        h, c = (torch.zeros(sizes, dtype=torch.float64) for _ in range(2))
        if self.written:
            h[0] = 1.0
        return self.r(x, (h, c) if isinstance(self.r, nn.LSTM | nn.LSTMCell) else h)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell])
def test_zeros_that_were_written_to_are_no_zeros(kind: type[nn.Module], written: bool) -> None:
    x = image(3, 7) if "Cell" in kind.__name__ else image(3, 2, 7)
    model = TakesZeros(kind, written)
    gm = compile_graph(model)
    check_equal(model, gm, x)
    operations = [n for n in calls(gm) if n.target in (ops.recurrent, ops.recurrent_cell)]
    if not written and "LSTM" in kind.__name__:  # one state may be None elsewhere
        assert operations[0].args[1] is None


@pytest.mark.parametrize("name", ["mean", "sum", "amax", "amin"])
def test_reductions_know_the_names_of_numpy(name: str) -> None:
    method = model_of(lambda m, x: getattr(x.relu(), name)(-1, keepdims=True))
    function = model_of(lambda m, x: getattr(torch, name)(x.relu(), axis=-1, keepdims=True))
    for model in (method, function):
        assert count(check(model, image()))["reduce"] == 1


@pytest.mark.parametrize(("layer", "kind"), [(nn.SELU(), "selu"), (nn.ELU(0.5), "elu"), (nn.CELU(0.5), None)])
def test_the_scales_of_a_decomposed_elu(layer: nn.Module, kind: str | None) -> None:
    model = model_of(lambda m, x: m.a(m.l(x)), l=nn.Linear(7, 5), a=layer)
    gm = compile_graph(torch.export.export(model, (image(),)).run_decompositions().module())
    check_equal(model, gm, image())
    assert (kind is None) or kind in [n.args[1] for n in calls(gm) if n.target is ops.eltwise]


@pytest.mark.parametrize("exponent", [2, 2.0])
def test_the_power_of_a_float_makes_floats_of_integers(exponent: float) -> None:
    numbers = torch.arange(6, dtype=torch.int64, device="cpu")
    check(model_of(lambda m, x: x**exponent), numbers)
    model = model_of(lambda m, x: x.relu() ** exponent)
    for x in (numbers, image()):
        gm = compile_graph(torch.export.export(model, (x,)).module())
        check_equal(model, gm, x)
        kinds = [n.args[1] for n in calls(gm) if n.target is ops.eltwise]
        assert "square" in kinds


def test_a_leaky_relu_without_slope_makes_no_number_of_infinity() -> None:
    x = torch.tensor([-torch.inf, -1.0, 2.0], dtype=torch.float64, device="cpu")
    model = model_of(lambda m, x: F.leaky_relu(x, 0.0) + F.leaky_relu(x, 0.1))
    with torch.no_grad():
        assert torch.equal(compile_graph(model)(x).isnan(), model(x).isnan())


@pytest.mark.parametrize("padding_idx", [None, -1, 3])
def test_the_padding_index_of_an_exported_bag(padding_idx: int | None) -> None:
    model = model_of(
        lambda m, i: F.embedding_bag(i, m.e.weight, mode="sum", padding_idx=padding_idx), e=nn.Embedding(9, 4)
    )
    indices = torch.tensor([[1, 8], [8, 3]], device="cpu")
    gm = compile_graph(torch.export.export(model, (indices,)).module())
    check_equal(model, gm, indices)
    assert count(gm)["embedding_bag"] == 1
