"""Residual sums stay float32 in bf16 regions: where they do, where not, and the error that is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from fx_passes.report.explain import Explanation
from tests.support.lowering import kinds, net, noise, offload, oracle

BF16, WIDE = torch.bfloat16, "float32"


def wide(found: Explanation) -> list[str]:
    """What the computing nodes became that leave their values in float32, in order."""
    return [node.became for node in found.nodes if node.computes and WIDE in node.layout]


def post_norm(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = m[0](x)
    x = m[2](m[1](x) + x)
    return m[3](F.gelu(m[2](m[1](x) + x)))


def pre_norm(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = m[0](x)
    x = x + m[1](m[2](x))
    x = x + m[1](m[2](x))
    return m[3](m[2](x))


def layers(norm: type[nn.Module] = nn.LayerNorm) -> tuple[nn.Module, ...]:
    torch.manual_seed(0)
    return nn.Linear(48, 48), nn.Linear(48, 48), norm(48), nn.Linear(48, 9)


LINEAR, LAYER_NORM, BINARY = "inner_product", "layer_normalization", "binary"


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("shape", [(2, 7, 48), (5, 48), (2, 48)], ids=str)
@pytest.mark.parametrize(
    "forward, expected",
    [
        (post_norm, [LINEAR, LAYER_NORM, LINEAR, LAYER_NORM, LINEAR]),  # the last one: as it leaves
        (pre_norm, [LINEAR, LAYER_NORM, LINEAR, LAYER_NORM, LINEAR]),
        (lambda m, x: m[3](m[2](torch.sigmoid(x) + torch.tanh(x))), [LAYER_NORM, LINEAR]),
    ],
    ids=["post-norm", "pre-norm", "sum of two values"],
)
def test_sums_that_a_normalization_reads(forward: Callable[..., Any], expected: list[str], shape: Any) -> None:
    found = offload(net(forward, *layers()), noise(*shape), dtype=BF16)
    assert [kind for kind in wide(found) if kind != BINARY] == expected


@pytest.mark.parametrize(
    "total, shape",
    [
        (lambda m, x: torch.sigmoid(x) + m[1].weight, (48, 48)),
        (lambda m, x: torch.sigmoid(x) + m[1].weight, (2, 48, 48)),
        (lambda m, x: m[1].weight + torch.sigmoid(x), (2, 48, 48)),
        (lambda m, x: torch.sigmoid(x) + torch.tanh(x[:1]), (2, 7, 48)),
        (lambda m, x: torch.sigmoid(x) + torch.tanh(x), (2, 7, 48)),
        (lambda m, x: m[0](x) + torch.tanh(x[:1]), (2, 7, 48)),
        (lambda m, x: m[0](x) + 1.5, (2, 7, 48)),
        (lambda m, x: (m[0](x) + torch.tanh(x)) + (m[1](x) + x), (2, 7, 48)),
        (lambda m, x: torch.relu(m[0](x) + torch.tanh(x)), (2, 7, 48)),
    ],
)
def test_whatever_is_added(total: Callable[..., Any], shape: tuple[int, ...]) -> None:
    found = offload(net(lambda m, x: m[3](m[2](total(m, x))), *layers()), noise(*shape), dtype=BF16)
    assert "torch" not in kinds(found)


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("shape", [(2, 7, 48), (1, 48)], ids=str)
def test_with_rms_norms(shape: tuple[int, ...]) -> None:
    found = offload(net(pre_norm, *layers(nn.RMSNorm)), noise(*shape), dtype=BF16)
    assert wide(found).count("rms_norm") == 2


@pytest.mark.needs("bf16")
@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: torch.tanh(m[1](m[2](m[0](x))) + x),  # no normalization reads the sum
        lambda m, x: torch.tanh(m[2](m[0](x) + m[1].bias)),  # nothing as large as the result is added
        lambda m, x: torch.tanh(m[2](m[0](x) * torch.tanh(x))),  # a product
    ],
)
def test_others_stay_bf16(forward: Callable[..., Any]) -> None:
    found = offload(net(forward, *layers()), noise(2, 7, 48), dtype=BF16)
    assert LAYER_NORM not in wide(found) and LINEAR not in wide(found)


@pytest.mark.parametrize("forward", [post_norm, pre_norm])
def test_error_is_a_fraction_of_eager_bf16(forward: Callable[..., Any]) -> None:
    """Of deep networks, whose residual sums are rounded once a layer in eager."""

    def deep(m: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = forward((nn.Identity(), m[1], m[2], nn.Identity()), x)
        return x

    model, x = net(deep, *layers()), noise(3, 16, 48)
    model.m[1].weight.data *= 0.1  # what is added is small, as in trained and in untrained transformers
    (expected,) = oracle(model, (x,))
    with torch.no_grad():
        ours = zendnn_cffi.optimize(model, (x,), dtype=BF16, tune="off")(x)
        eager = model.to(BF16)(x.to(BF16))
    errors = [float((y.double() - expected).norm() / expected.norm()) for y in (ours, eager)]
    assert errors[0] < 0.75 * errors[1]
