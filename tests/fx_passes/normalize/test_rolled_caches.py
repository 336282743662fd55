"""Caches with a sliding window: which rolls become concatenations, and whether all is as eager leaves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from tests.support.graphs import count
from zendnn_cffi.backend import compiled_modules

HEADS, DEPTH, SIZE = 2, 8, 6
Push = Callable[[Tensor, Tensor], Tensor]


def by_tensor(cache: Tensor, new: Tensor) -> Tensor:
    """As a static cache of Hugging Face."""
    rolled = cache.roll(-1, dims=-2)
    rolled[:, :, torch.tensor([-1], dtype=torch.int64)] = new
    return rolled


def by_slice(cache: Tensor, new: Tensor) -> Tensor:
    rolled = torch.roll(cache, (-1,), (2,))
    rolled[:, :, -1:, :] = new
    return rolled


def rolled_back(cache: Tensor, new: Tensor) -> Tensor:
    rolled = cache.roll(1, dims=-2)
    rolled[:, :, -1:] = new
    return rolled


def first_place(cache: Tensor, new: Tensor) -> Tensor:
    rolled = cache.roll(-1, dims=-2)
    rolled[:, :, :1] = new
    return rolled


def another_dimension(cache: Tensor, new: Tensor) -> Tensor:
    rolled = cache.roll(-1, dims=1)
    rolled[:, :, -1:] = new
    return rolled


def broadcast(cache: Tensor, new: Tensor) -> Tensor:
    rolled = cache.roll(-1, dims=-2)
    rolled[:, :, -1:] = new[:, :1]
    return rolled


def read_before(cache: Tensor, new: Tensor) -> Tensor:
    rolled = cache.roll(-1, dims=-2)
    before = rolled / 4  # of more the cache would grow, and rounding errors with it
    rolled[:, :, -1:] = new
    return rolled + before


def part_of_it(cache: Tensor, new: Tensor) -> Tensor:
    rolled = cache.roll(-1, dims=-2)
    rolled[:, :, -1:, :4] = new[..., :4]
    return rolled


def cache_written_between(cache: Tensor, new: Tensor) -> Tensor:
    rolled = cache.roll(-1, dims=-2)
    cache.mul_(2)
    rolled[:, :, -1:] = new
    return rolled


def added(cache: Tensor, new: Tensor) -> Tensor:
    rolled = cache.roll(-1, dims=-2)
    return rolled.index_put_((*[slice_of(rolled, dim) for dim in (0, 1)], torch.tensor([-1])), new / 4, accumulate=True)


def slice_of(x: Tensor, dim: int) -> Tensor:
    """All places along a dimension, as a column."""
    return torch.arange(x.shape[dim]).reshape(*[-1 if each == dim else 1 for each in range(3)])


def slice_read_as_well(cache: Tensor, new: Tensor) -> Tensor:
    rolled = cache.roll(-1, dims=-2)
    last = rolled[:, :, -1:]
    last.copy_(new)
    return rolled + last / 4


def last_but_one(cache: Tensor, new: Tensor) -> Tensor:
    rolled = cache.roll(-1, dims=-2)
    rolled[:, :, -2:-1] = new
    return rolled


RECOGNISED = {"by tensor": by_tensor, "by slice": by_slice}
MISSES = {
    miss.__name__: miss
    for miss in (
        rolled_back, first_place, another_dimension, broadcast, read_before, part_of_it, cache_written_between, added,
        slice_read_as_well, last_but_one,
    )
}  # fmt: skip


class Layers(nn.Module):
    """Two layers that attend to the last tokens, in caches [B, 2, 6, 8] which they write to."""

    def __init__(self, push: Push) -> None:
        super().__init__()
        self.push = push
        self.q, self.k, self.v = (nn.ModuleList(nn.Linear(16, 16) for _ in range(2)) for _ in range(3))

    def forward(self, x: Tensor, *caches: Tensor) -> Tensor:
        for layer in range(2):
            q, k, v = (m[layer](x).view(x.shape[0], 1, HEADS, DEPTH).transpose(1, 2) for m in (self.q, self.k, self.v))
            keys, values = caches[2 * layer : 2 * layer + 2]
            new_keys, new_values = self.push(keys, k), self.push(values, v)
            keys.copy_(new_keys), values.copy_(new_values)
            x = x + F.scaled_dot_product_attention(q, keys, values).transpose(1, 2).flatten(2)
        return x


def caches(batch: int = 1, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, HEADS, SIZE, DEPTH, generator=generator).to(dtype) for _ in range(4)]


def steps_are_eagers(
    push: Push, batch: int = 1, dtype: torch.dtype = torch.float32, *, exports: bool = False
) -> zendnn_cffi.OptimizedModule:
    """Compare eight steps and the caches after each; return what torch.compile, or optimize of an export, made."""
    torch.manual_seed(0)
    model = Layers(push).eval().to(dtype)
    if exports:
        program = torch.export.export(model, (torch.randn(batch, 1, 16).to(dtype), *caches(batch, dtype)))
        compiled: Any = zendnn_cffi.optimize(program, tune="off")
    else:
        compiled = torch.compile(model, backend="zendnn", options={"tune": "off"})
    mine, theirs = caches(batch, dtype), caches(batch, dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 0.1  # bf16: eight steps of sums of 16 products
    for step in range(8):
        x = torch.randn(batch, 1, 16, generator=torch.Generator().manual_seed(step)).to(dtype)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, *mine), model(x, *theirs), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    return compiled if exports else compiled_modules()[-1]


@pytest.mark.parametrize("exports", [False, True])
@pytest.mark.parametrize("example", RECOGNISED)
@pytest.mark.parametrize("batch", [1, 3])
def test_one_region_for_all_layers(example: str, batch: int, exports: bool) -> None:
    gm = steps_are_eagers(RECOGNISED[example], batch, exports=exports)
    assert len(gm.regions()) == 1
    assert not {"roll", "setitem", "roll.default", "index_put.default"} & set(count(gm))


def test_bf16() -> None:
    assert len(steps_are_eagers(by_tensor, dtype=torch.bfloat16).regions()) == 1


IN_EXPORTS = [miss for miss in MISSES if miss != "broadcast"]  # torch.export writes out what repeats


@pytest.mark.parametrize(("miss", "exports"), [*((m, False) for m in MISSES), *((m, True) for m in IN_EXPORTS)])
def test_not_taken_for_it(miss: str, exports: bool) -> None:
    found = count(steps_are_eagers(MISSES[miss], exports=exports))
    assert found["roll"] + found["roll.default"] == 4


def test_a_window_of_one_token() -> None:
    compiled = torch.compile(by_tensor, backend="zendnn")
    cache, new = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8)
    with torch.no_grad():
        assert torch.equal(compiled(cache, new), by_tensor(cache, new))
