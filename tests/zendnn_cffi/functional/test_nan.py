"""What becomes of a NaN: the table "Not a number" of docs/low-level.md, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from tests.support.lowering import net, noise
from tests.zendnn_cffi.functional.support import DTYPES
from zendnn_cffi import functional as zf
from zendnn_cffi.primitives.attributes import BINARY, COMPARISONS, ELTWISE

NAN = float("nan")
LOST = {"relu": 0.0, "bounded_relu": 0.0, "clip": -0.5, "clip_v2": -0.5, "exp": math.inf}  # what a NaN becomes
PARAMETERS = {"clip": (-0.5, 2.0), "clip_v2": (-0.5, 2.0), "bounded_relu": (6.0,), "elu": (1.0,), "swish": (1.0,),
              "linear": (2.0, 1.0), "pow": (1.0, 2.0)}  # fmt: skip


def with_nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Positive noise, so that logarithms and roots make no further NaN, with a NaN in the middle."""
    x = noise(*shape).abs().add(0.1).to(dtype)
    x.view(-1)[x.numel() // 2] = NAN
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ELTWISE)
def test_eltwise(kind: str, dtype: torch.dtype) -> None:
    if kind == "round" and dtype == torch.bfloat16:
        dtype = torch.float32  # the library has no other
    x = with_nan(5, 33, dtype=dtype)
    y = zf.eltwise(x, kind, *PARAMETERS.get(kind, ()))
    at = x.isnan()
    assert not y[~at].isnan().any(), "it spread"
    if kind in LOST:
        assert y[at].tolist() == [LOST[kind]]
    else:
        assert y[at].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_leaky_relu_and_prelu_keep_it(dtype: torch.dtype) -> None:
    x = with_nan(5, 33, dtype=dtype)
    for y in (zf.eltwise(x, "relu", 0.1), zf.prelu(x, torch.full((1,), 0.1, dtype=dtype))):
        assert torch.equal(y.isnan(), x.isnan())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", sorted(BINARY.keys() - COMPARISONS))
def test_binary(kind: str, dtype: torch.dtype) -> None:
    x, other = with_nan(5, 33, dtype=dtype), torch.full((5, 33), 3.0, dtype=dtype)
    first, second = zf.binary(x, other, kind), zf.binary(other, x, kind)
    assert torch.equal(second.isnan(), x.isnan())
    if kind in ("max", "min"):
        assert first[x.isnan()].tolist() == [3.0]
    else:
        assert torch.equal(first.isnan(), x.isnan())


@pytest.mark.parametrize("memory_format", (torch.contiguous_format, torch.channels_last), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pooling(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    x = with_nan(1, 16, 8, 8, dtype=dtype).contiguous(memory_format=memory_format)
    assert torch.equal(zf.pooling(x, "max", 2, stride=2), F.max_pool2d(x.nan_to_num(-math.inf), 2))
    averages = zf.pooling(x, "avg_include_padding", 2, stride=2)
    assert torch.equal(averages.isnan(), F.avg_pool2d(x, 2).isnan())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ("max", "min", "sum", "mean"))
def test_reduction(kind: str, dtype: torch.dtype) -> None:
    x = with_nan(5, 33, dtype=dtype)
    y = zf.reduction(x, kind, 1).reshape(5)
    if kind in ("max", "min"):
        left_out = x.nan_to_num(-math.inf if kind == "max" else math.inf)
        assert torch.equal(y, left_out.amax(1) if kind == "max" else left_out.amin(1))
    else:
        assert torch.equal(y.isnan(), x.isnan().any(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_keeps_it_to_itself(dtype: torch.dtype) -> None:
    x = with_nan(5, 33, dtype=dtype)
    for function in (zf.softmax, zf.log_softmax):
        assert torch.equal(function(x, 1).isnan(), x.isnan())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_and_normalizations_hand_it_on(dtype: torch.dtype) -> None:
    x, weights = with_nan(5, 33, dtype=dtype), noise(7, 33).to(dtype)
    rows = x.isnan().any(1)
    for y in (zf.inner_product(x, weights), zf.matmul(x, weights.t()), zf.gemm(x, weights.t()), zf.layer_norm(x, 33)):
        assert torch.equal(y.isnan().all(1), rows) and torch.equal(y.isnan().any(1), rows)
    image, filters = with_nan(1, 16, 9, 9, dtype=dtype), noise(4, 16, 3, 3).to(dtype)
    expected = F.conv2d(image.float(), filters.float(), padding=1).isnan()
    assert torch.equal(zf.convolution(image, filters, padding=1).isnan(), expected)


MODELS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "relu": lambda m, x: F.relu(m[0](x)),
    "relu6": lambda m, x: F.relu6(m[0](x)),
    "clamp": lambda m, x: m[0](x).clamp(-1, 1),
    "max_pool": lambda m, x: F.max_pool2d(m[0](x), 2),
}
KEPT: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "silu": lambda m, x: F.silu(m[0](x)),
    "gelu": lambda m, x: F.gelu(m[0](x)),
    "sigmoid": lambda m, x: torch.sigmoid(m[0](x)),
    "tanh": lambda m, x: torch.tanh(m[0](x)),
    "hardswish": lambda m, x: F.hardswish(m[0](x)),
    "leaky_relu": lambda m, x: F.leaky_relu(m[0](x), 0.1),
    "avg_pool": lambda m, x: F.avg_pool2d(m[0](x), 2),
}


@pytest.mark.parametrize("name", [*MODELS, *KEPT])
def test_optimized_models(name: str) -> None:
    """Where no NaN reaches, results are right; where one does, it stays or is lost, and for some it always stays."""
    model = net({**MODELS, **KEPT}[name], nn.Conv2d(3, 16, 3, padding=1))
    x = noise(1, 3, 8, 8)
    x[0, 1, 2, 3] = NAN
    gm = zendnn_cffi.optimize(model, tune="off")
    y, expected = gm(x), model(x).detach()
    assert all(node.offloaded for node in zendnn_cffi.explain(gm).nodes)
    reached = expected.isnan()
    assert reached.any() and not reached.all()
    torch.testing.assert_close(y[~reached], expected[~reached], atol=1e-4, rtol=1e-4)
    if name in KEPT:
        assert y[reached].isnan().all()


@pytest.mark.parametrize(("kind", "value"), [("max", -math.inf), ("min", math.inf)])
def test_extremes_of_infinities_alone_are_finite(kind: str, value: float) -> None:
    x = torch.full((2, 16, 4, 4), value)
    x[0, 0, 0, 0] = 1.0
    found = zf.reduction(x, kind, [3])
    assert float(found[0, 0, 0]) == 1.0
    assert float(found[1, 3, 2]) == math.copysign(torch.finfo(torch.float32).max, value)
    if kind == "max":
        pooled = zf.pooling(x, "max", (2, 2), stride=(2, 2))
        assert float(pooled[0, 0, 0, 0]) == 1.0 and float(pooled[1, 0, 0, 0]) == torch.finfo(torch.float32).min
