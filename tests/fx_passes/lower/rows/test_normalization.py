"""Batch normalization on its own, layer normalization, softmax."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.rules import lower_graph
from fx_passes.search.measure import CHECK_ONLY, Bench
from tests.support.lowering import kinds, net, noise, offload

DTYPES = (None, torch.bfloat16)
BN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", (True, False))
@pytest.mark.parametrize(
    "shape", ((5, 17), (2, 17, 4), (2, 17, 4, 3), (1, 16, 3, 3), (2, 1, 3, 3), (1, 3, 2, 3, 2)), ids=str
)
def test_batch_norm(shape: tuple[int, ...], affine: bool, dtype: torch.dtype | None) -> None:
    for after in (lambda y: y, F.relu, torch.tanh, lambda y: F.relu(y) + 1):
        model = net(lambda m, x: after(m[0](x)), BN[len(shape)](shape[1], affine=affine))  # noqa: B023
        found = offload(model, noise(*shape), dtype=dtype, k=4)
        assert kinds(found)[0] == "batch_normalization" and "torch" not in kinds(found)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("relu", (True, False))
@pytest.mark.parametrize("affine", (True, False))
@pytest.mark.parametrize("shape", ((2, 17, 4, 3), (1, 16, 3, 3), (3, 48, 1, 1), (1, 1, 5, 2)), ids=str)
def test_batch_norm_as_depthwise_convolution(
    shape: tuple[int, ...], affine: bool, relu: bool, dtype: torch.dtype
) -> None:
    """Every such candidate is right, and there is one for channels last."""
    graph = fx.Graph()
    constants = {"mean": noise(shape[1]), "var": noise(shape[1]).square() + 0.1}
    if affine:
        constants |= {"weight": noise(shape[1]), "bias": noise(shape[1])}
    x = graph.placeholder("x")
    arguments = [graph.get_attr(name) if name in constants else None for name in ("mean", "var", "weight", "bias")]
    post_ops = (("eltwise", "relu", 0.0, 0.0),) if relu else ()
    graph.output(graph.call_function(ops.batch_norm, (x, *arguments), {"eps": 1e-5, "post_ops": post_ops}))
    (operation,), values = lower_graph(graph, [TensorSpec.of(torch.empty(shape))], constants, compute_dtype=dtype)
    depthwise = [c for c in operation.candidates if "_dw" in c.implementation]
    assert any(c.dst.format == "nhwc" or shape[2:] == (1, 1) for c in depthwise)
    bench = Bench(operation, values)
    for candidate in depthwise:
        assert bench.check_and_time(candidate, CHECK_ONLY).error <= (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.needs("bf16")
def test_batch_norm_in_bf16_stays_exact_around_a_large_mean() -> None:
    """The shift is made of the rounded scale: their errors must not add up where the mean is far from zero."""
    norm = nn.BatchNorm2d(16)
    model = net(lambda m, x: m[0](x), norm)
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.fill_(32.0)
    norm.running_var.uniform_(0.01, 3.0, generator=torch.Generator().manual_seed(0))
    x = 32.0 + noise(1, 16, 5, 5).mul(4).round() / 4  # exact in bf16
    gm = zendnn_cffi.optimize(model, dtype=torch.bfloat16, tune="off")
    with torch.no_grad():
        actual, expected = gm(x), norm.double()(x.double())
    (node,) = zendnn_cffi.explain(gm).nodes
    assert "_dw" in node.implementation
    assert float((actual - expected).abs().max() / expected.abs().max()) < 6e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_norm_between_convolutions(dtype: torch.dtype | None) -> None:
    """DenseNet's order: the normalized value is read, and so is the plain one."""

    def fn(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        a = m[0](x)
        return m[2](F.relu(m[1](a))) + a

    model = net(fn, nn.Conv2d(3, 17, 3, padding=1), nn.BatchNorm2d(17), nn.Conv2d(17, 17, 1))
    found = offload(model, noise(2, 3, 6, 6), dtype=dtype)
    assert sorted(kinds(found)) == ["batch_normalization", "convolution", "convolution"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", (True, False))
@pytest.mark.parametrize("shape", ((5, 17), (2, 3, 16), (1, 2, 3, 5), (2, 3, 1)), ids=str)
def test_layer_norm(shape: tuple[int, ...], affine: bool, dtype: torch.dtype | None) -> None:
    norm = nn.LayerNorm(shape[-1], elementwise_affine=affine)
    if affine:
        norm.weight.data.copy_(noise(shape[-1]))
        norm.bias.data.copy_(noise(shape[-1], seed=1))
    found = offload(net(lambda m, x: m[0](x), norm), noise(*shape), dtype=dtype, k=4)
    assert kinds(found) == ["layer_normalization"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_over_channels(dtype: torch.dtype | None) -> None:
    """ConvNeXt's: permuted around, so that channels are last."""

    def fn(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return m[2](m[1](m[0](x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))

    model = net(fn, nn.Conv2d(3, 17, 3, padding=1), nn.LayerNorm(17), nn.Conv2d(17, 4, 1))
    found = offload(model, noise(2, 3, 6, 5), dtype=dtype)
    assert kinds(found) == ["convolution", "layer_normalization", "convolution"]


def test_layer_norm_over_more_dimensions_stays_plain() -> None:
    found = offload(net(lambda m, x: m[0](x), nn.LayerNorm((3, 4))), noise(2, 3, 4), k=12)
    assert kinds(found) == ["torch"] and "last dimension" in found.nodes[0].reason


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("log", (False, True))
@pytest.mark.parametrize("shape", ((7,), (5, 17), (2, 3, 33), (1, 2, 3, 5)), ids=str)
def test_softmax(shape: tuple[int, ...], log: bool, dtype: torch.dtype | None) -> None:
    found = offload(
        net(lambda m, x: m[int(log)](torch.tanh(x) * 5), nn.Softmax(-1), nn.LogSoftmax(-1)), noise(*shape), dtype=dtype
    )
    assert kinds(found) == ["eltwise", "eltwise", "softmax"]


def test_softmax_over_another_dimension_stays_plain() -> None:
    found = offload(net(lambda m, x: torch.softmax(m[0](x), 1), nn.Conv2d(3, 5, 1)), noise(2, 3, 4, 4))
    assert kinds(found) == ["convolution", "torch"]


def test_softmax_of_minus_infinity() -> None:
    x = noise(3, 5)
    x[0, 2:] = -float("inf")
    offload(net(lambda m, x: torch.softmax(x, -1), nn.Identity()), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_block(dtype: torch.dtype | None) -> None:
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    model = net(lambda m, x: m[2](m[1](m[0](x) + m[3](m[0](x), m[0](x), m[0](x), need_weights=False)[0])),
                nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 5), attention)  # fmt: skip
    found = offload(model, noise(2, 7, 16), dtype=dtype)
    assert "inner_product" in kinds(found)
