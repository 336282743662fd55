"""Rewrites of several nodes, where something is written to between these: what was read before stays what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fx_passes.pipeline import compile_graph
from tests.support.lowering import noise
from tests.support.quantized import Integers, Weight, decomposed, kept, real, through

U8, S8 = torch.uint8, torch.int8


def rows(w: Any, x: Tensor) -> Tensor:
    """The rows are a copy."""
    y = F.relu(x).transpose(0, 1)
    matrix = y.reshape(-1, 16)
    y[:, 0] = 7.0
    return F.linear(matrix, w[0](), w[0].bias).reshape(y.shape[0], y.shape[1], 16)


def narrow(w: Any, x: Tensor) -> Tensor:
    y = F.relu(x)
    before = narrowed(y)
    y[:, 0] = 50.0
    return before + narrowed(y)


def narrow_relu(w: Any, x: Tensor) -> Tensor:
    y = x + 1
    z = F.relu(y)
    y[:, 0] = 50.0
    return narrowed(z) + y


def narrow_twice(w: Any, x: Tensor) -> Tensor:
    """What was dequantized is no longer within the limits."""
    y = narrowed(x)
    y[:, 0] = 500.0
    return narrowed(y)


def narrowed(x: Tensor) -> Tensor:
    integers = decomposed.quantize_per_tensor.default(x, 0.04, 3, 0, 127, U8)
    return decomposed.dequantize_per_tensor.default(integers, 0.04, 3, 0, 127, U8)


def view(w: Any, x: Tensor) -> Tensor:
    y = F.linear(x, w[0](), w[0].bias)
    turned = y.reshape(-1, 4, 4).transpose(1, 2).reshape(2, -1)
    y[:, 0] = 3.0
    return through(turned, 0.03, 5, U8) * 2.0


def concatenation(w: Any, x: Tensor) -> Tensor:
    pieces = [kept(part, 0.02, 100) for part in (x, x + 1, x - 1)]
    first = torch.cat([real(piece, 0.02, 100) for piece in pieces[:2]], 1)
    first[:, 0] = 9.0
    return torch.cat([first, *(real(piece, 0.02, 100) for piece in pieces)], 1) + torch.cat(
        [*(real(piece, 0.02, 100) for piece in pieces), first], 1
    )


def scales(w: Any, x: Tensor) -> Tensor:
    """Those of the values before."""
    y = F.relu(x)
    scale, zero_point = decomposed.choose_qparams.tensor(y, -128, 127, 1e-5, S8)
    y[:, 0] = 9.0
    integers = decomposed.quantize_per_tensor.tensor(y, scale, zero_point, -128, 127, S8)
    y = decomposed.dequantize_per_tensor.tensor(integers, scale, zero_point, -128, 127, S8)
    return F.linear(y, w[0](), w[0].bias)


@pytest.mark.parametrize("function", [rows, narrow, narrow_relu, narrow_twice, view, concatenation, scales])
def test_what_was_read_before_a_write_stays(function: Callable[..., Tensor]) -> None:
    model, x = Integers(function, Weight(16, 16)), noise(2, 3, 16)
    with torch.no_grad():
        expected = model(x.clone())
        for gm in (
            compile_graph(model, (x.clone(),)),
            compile_graph(torch.export.export(model, (x.clone(),)).module()),
        ):
            torch.testing.assert_close(gm(x.clone()), expected)
