"""Rotary embedding by tables that a model keeps, and of values without examples, as timm's EVA writes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi

HEADS, DEPTH, LENGTH = 2, 8, 6


class Attention(nn.Module):
    """The first token is not turned."""

    def __init__(self, dtype: torch.dtype = torch.float32, width: int = DEPTH) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HEADS * DEPTH, 3 * HEADS * DEPTH), nn.Linear(HEADS * DEPTH, HEADS * DEPTH)
        angles = torch.arange(LENGTH - 1)[:, None] / 10 ** torch.linspace(0, 1, DEPTH // 2)
        table = torch.cat((angles.sin(), angles.cos()), -1).repeat_interleave(2, -1)[:, : 2 * width]
        self.register_buffer("table", table.to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, HEADS, DEPTH).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = (torch.cat((y[:, :, :1], self.turn(y[:, :, 1:])), 2).type_as(v) for y in (q, k))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(n, length, -1))

    def turn(self, y: Tensor) -> Tensor:
        sin, cos = self.table.chunk(2, -1)
        turned = torch.stack([-y[..., 1::2], y[..., ::2]], -1).reshape(y.shape)
        return (y * cos + turned * sin).to(dtype=y.dtype)


def turned(fast: Any) -> list[Any]:
    return [node for node in zendnn_cffi.explain(fast).nodes if node.became == "rotary"]


def test_a_model_that_torch_fx_traces_is_one_region() -> None:
    model = Attention().eval()
    fast = zendnn_cffi.optimize(model, tune="off")
    for batch in (1, 3):
        x = torch.randn(batch, LENGTH, HEADS * DEPTH)
        torch.testing.assert_close(fast(x), model(x))
    assert len(fast.regions()) == 1
    assert len(turned(fast)) == 4  # of two shapes
    assert all(node.reason == "" for node in turned(fast)), zendnn_cffi.explain(fast)


class Derived(Attention):
    """The table is computed in each call."""

    def turn(self, y: Tensor) -> Tensor:
        sin, cos = (self.table * 2 - 0.5).chunk(2, -1)
        turned = torch.stack([-y[..., 1::2], y[..., ::2]], -1).reshape(y.shape)
        return (y * cos + turned * sin).to(dtype=y.dtype)


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("kind", [Attention, Derived])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_that_change_are_noticed(kind: type[Attention], example: bool, dtype: torch.dtype) -> None:
    bound = {} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    model, x = kind().eval().to(dtype), torch.randn(2, LENGTH, HEADS * DEPTH, dtype=dtype)
    fast = zendnn_cffi.optimize(model, (x,) if example else None, tune="off")
    torch.testing.assert_close(fast(x), model(x), **bound)
    with torch.no_grad():
        model.table.mul_(-0.5)
    torch.testing.assert_close(fast(x), model(x), **bound)
    model.table, fast.table = model.table.neg(), fast.table.neg()
    torch.testing.assert_close(fast(x), model(x), **bound)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tables_of_another_dtype(dtype: torch.dtype) -> None:
    """A wider table promotes the value; a narrower one does not, and its numbers count as they are."""
    model, x = Attention(dtype).eval(), torch.randn(2, LENGTH, HEADS * DEPTH)
    fast = zendnn_cffi.optimize(model, tune="off")
    torch.testing.assert_close(fast(x), model(x))


def test_bf16() -> None:
    model, x = Attention().eval(), torch.randn(2, LENGTH, HEADS * DEPTH)
    fast = zendnn_cffi.optimize(model, (x,), dtype=torch.bfloat16, tune="off")
    torch.testing.assert_close(fast(x), model(x), atol=3e-2, rtol=3e-2)
    assert len(turned(fast)) == 2


def test_values_of_an_odd_size_are_refused_as_by_pytorch() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 5)
            self.register_buffer("cos", torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            turned = torch.stack([-y[..., 1::2], y[..., ::2]], -1).reshape(y.shape)
            return y * self.cos + turned * self.cos

    model, x = Odd().eval(), torch.randn(2, 4)
    fast = zendnn_cffi.optimize(model, tune="off")
    for module in (model, fast):
        with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
            module(x)
