"""Biases, statistics, scales, offsets and weights per sample, lying in memory in every way a caller may hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.tolerance import assert_close
from tests.zendnn_cffi.functional.support import randn
from zendnn_cffi import functional as zf

N = 12
WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every second": lambda v: torch.stack([v, v + 1], -1).reshape(*v.shape[:-1], -1)[..., ::2],
    "column": lambda v: torch.stack([v + 1, v, v + 2], -1)[..., 1],
    "real": lambda v: torch.complex(v.float(), v.float() + 1).real.to(v.dtype) if v.dtype == torch.float32 else v,
    "storage offset": lambda v: torch.cat([v.reshape(-1) + 1, v.reshape(-1)])[v.numel() :].view(v.shape),
    "expanded": lambda v: v.reshape(-1)[:1].expand(v.shape),
}
X, IMAGES, MATRIX = randn(5, 8), randn(2, N, 6, 6), randn(5, N)
W, KERNEL, UP, COLUMN = randn(N, 8), randn(N, N, 3, 3), randn(N, N, 2, 2), randn(8, N)
TABLE = randn(20, N)
INDICES, OFFSETS = torch.randint(20, (N,)), torch.tensor([0, 2, 2, 3, 3, 4, 6, 6, 9, 10, 10, 11])


def f64(v: Any) -> Any:
    return v.double()


# name -> (function of one small operand, the same in float64, that operand)
OPERANDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], torch.Tensor]] = {
    "bias of inner_product": (
        lambda v: zf.inner_product(X, W, v),
        lambda v: F.linear(f64(X), f64(W), f64(v)),
        randn(N),
    ),
    "bias of matmul": (lambda v: zf.matmul(X, COLUMN, v), lambda v: f64(X) @ f64(COLUMN) + f64(v), randn(N)),
    "whole bias of matmul": (lambda v: zf.matmul(X, COLUMN, v), lambda v: f64(X) @ f64(COLUMN) + f64(v), randn(5, N)),
    "column bias of matmul": (lambda v: zf.matmul(X, COLUMN, v), lambda v: f64(X) @ f64(COLUMN) + f64(v), randn(5, 1)),
    "bias of a row of matmul": (lambda v: zf.matmul(X[0], COLUMN, v), lambda v: f64(X[0]) @ f64(COLUMN) + v, randn(N)),
    "bias of a column of matmul": (lambda v: zf.matmul(X, W[0], v), lambda v: f64(X) @ f64(W[0]) + v, randn(5)),
    "bias of convolution": (
        lambda v: zf.convolution(IMAGES, KERNEL, v),
        lambda v: F.conv2d(f64(IMAGES), f64(KERNEL), f64(v)),
        randn(N),
    ),
    "bias of deconvolution": (
        lambda v: zf.deconvolution(IMAGES, UP, v),
        lambda v: F.conv_transpose2d(f64(IMAGES), f64(UP), f64(v)),
        randn(N),
    ),
    "bias of gemm": (lambda v: zf.gemm(X, COLUMN, v), lambda v: f64(X) @ f64(COLUMN) + f64(v), randn(N)),
    "scales of gemm": (
        lambda v: zf.gemm(X, COLUMN, post_ops=[("scale", v, v + 0)]),
        lambda v: f64(X) @ f64(COLUMN) * f64(v) + f64(v),
        randn(N),
    ),
    "zero points of gemm": (
        lambda v: zf.gemm(X, COLUMN, post_ops=[("scale", 2.0, v)]),
        lambda v: f64(X) @ f64(COLUMN) * 2 + f64(v),
        randn(N),
    ),
    "matrix of gemm": (
        lambda v: zf.gemm(X, COLUMN, post_ops=[("binary", "mul", v)]),
        lambda v: f64(X) @ f64(COLUMN) * f64(v),
        randn(5, N),
    ),
    "mean of batch_norm": (
        lambda v: zf.batch_norm(IMAGES, v, torch.ones(N)),
        lambda v: F.batch_norm(f64(IMAGES), f64(v), torch.ones(N).double()),
        randn(N),
    ),
    "variance of batch_norm": (
        lambda v: zf.batch_norm(IMAGES, torch.zeros(N), v),
        lambda v: F.batch_norm(f64(IMAGES), torch.zeros(N).double(), f64(v)),
        torch.rand(N) + 0.5,
    ),
    "weight of batch_norm": (
        lambda v: zf.batch_norm(IMAGES, torch.zeros(N), torch.ones(N), v),
        lambda v: F.batch_norm(f64(IMAGES), torch.zeros(N).double(), torch.ones(N).double(), f64(v)),
        randn(N),
    ),
    "bias of batch_norm": (
        lambda v: zf.batch_norm(MATRIX, torch.zeros(N), torch.ones(N), None, v),
        lambda v: F.batch_norm(f64(MATRIX), torch.zeros(N).double(), torch.ones(N).double(), None, f64(v)),
        randn(N),
    ),
    "weight of layer_norm": (
        lambda v: zf.layer_norm(MATRIX, N, v),
        lambda v: F.layer_norm(f64(MATRIX), (N,), f64(v)),
        randn(N),
    ),
    "bias of layer_norm": (
        lambda v: zf.layer_norm(MATRIX, N, None, v),
        lambda v: F.layer_norm(f64(MATRIX), (N,), None, f64(v)),
        randn(N),
    ),
    "weight of prelu": (lambda v: zf.prelu(IMAGES, v), lambda v: F.prelu(f64(IMAGES), f64(v)), randn(N)),
    "weight of a prelu post-op": (
        lambda v: zf.convolution(IMAGES, KERNEL, post_ops=[("prelu", v)]),
        lambda v: F.prelu(F.conv2d(f64(IMAGES), f64(KERNEL)), f64(v)),
        randn(N),
    ),
    "row of a binary post-op": (
        lambda v: zf.inner_product(X, W, post_ops=[("binary", "mul", v)]),
        lambda v: F.linear(f64(X), f64(W)) * f64(v),
        randn(N),
    ),
    "row of binary": (lambda v: zf.binary(MATRIX, v, "sub"), lambda v: f64(MATRIX) - f64(v), randn(N)),
    "indices of embedding_bag": (
        lambda v: zf.embedding_bag(TABLE, v, OFFSETS),
        lambda v: F.embedding_bag(v, f64(TABLE), OFFSETS, mode="sum"),
        INDICES,
    ),
    "offsets of embedding_bag": (
        lambda v: zf.embedding_bag(TABLE, INDICES, v),
        lambda v: F.embedding_bag(INDICES, f64(TABLE), v, mode="sum"),
        OFFSETS,
    ),
    "weights of embedding_bag": (
        lambda v: zf.embedding_bag(TABLE, INDICES, OFFSETS, weights=v),
        lambda v: F.embedding_bag(INDICES, f64(TABLE), OFFSETS, mode="sum", per_sample_weights=f64(v)),
        randn(N),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPERANDS)
def test_strides_are_read(name: str, way: str) -> None:
    function, expected, values = OPERANDS[name]
    held = WAYS[way](values)
    assert held.shape == values.shape and (way == "expanded" or torch.equal(held, values))
    assert_close(function(held), expected(held.contiguous()), k=N * 9)
