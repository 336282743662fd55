"""Attention that models write out over caches that grow: which is recognised, and what only looks like it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.fuse.written_attention import fuse_written_attention
from tests.support.graphs import after, check_twice, count

HEADS, DEPTH, BATCH, PAST = 4, 8, 2, 6
Attend = Callable[..., Any]


class Step(nn.Module):
    """A token x [B, 1, 32], caches [B, G, S, 8], a mask [1, 1, 1, S + 1], numbers of heads [B * 4, 1, S + 1]."""

    def __init__(self, attend: Attend, groups: int = HEADS) -> None:
        super().__init__()
        self.attend = attend
        self.q, self.k, self.v = (nn.Linear(32, n * DEPTH) for n in (HEADS, groups, groups))
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor, slopes: Tensor) -> tuple[Any, ...]:
        if x.shape[0] > 99:  # a condition: torch.export follows it, symbolic tracing does not
            x = x * 1
        q, k, v = (m(x).view(x.shape[0], 1, -1, DEPTH).transpose(1, 2) for m in (self.q, self.k, self.v))
        keys, values = torch.cat((keys, k), -2), torch.cat((values, v), -2)
        result = self.attend(q, keys, values, mask, slopes)
        result, *others = result if isinstance(result, tuple) else (result,)
        return self.out(result.transpose(1, 2).reshape(x.shape[0], 1, 32)), keys, values, *others


def repeated(x: Tensor) -> Tensor:
    b, groups, s, d = x.shape
    return x[:, :, None, :, :].expand(b, groups, HEADS // groups, s, d).reshape(b, HEADS, s, d)


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, slopes: Tensor) -> Tensor:
    """As Hugging Face's eager attentions."""
    k, v = (repeated(x) if x.shape[1] < HEADS else x for x in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * DEPTH**-0.5 + mask
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def without_mask(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / 3, -1) @ v


def bloom(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, slopes: Tensor) -> Tensor:
    b, heads, length, d = q.shape
    q, k, v = (x.reshape(b * heads, -1, d) for x in (q, k, v))
    scores = slopes.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=1.0, alpha=0.3)
    scores = scores.view(b, heads, length, -1) + mask
    shares = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(shares.view(b * heads, length, -1), v).view(b, heads, length, d)


def scaled_behind_the_sum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, slopes: Tensor) -> Tensor:
    return torch.softmax((q @ k.transpose(-1, -2) + mask) * 0.3, -1) @ v


def softcapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, slopes: Tensor) -> Tensor:
    return torch.softmax(torch.tanh(q @ k.transpose(-1, -2) / 5) * 5 + mask, -1) @ v


def shares_returned(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    shares = torch.softmax(q @ k.transpose(-1, -2) + mask, -1)
    return shares @ v, shares


def scores_read_elsewhere(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(-1, -2) + mask
    return torch.softmax(scores, -1) @ v, scores.sum()


def over_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, slopes: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) + mask, 1) @ v


def log_shares(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, slopes: Tensor) -> Tensor:
    return torch.log_softmax(q @ k.transpose(-1, -2), -1) @ v


def one_number_for_all_places(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, slopes: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) + q[..., :1], -1) @ v


def heads_of_other_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, slopes: Tensor) -> Tensor:
    """The batch and heads are exchanged before they share a dimension."""
    b, heads, length, d = q.shape
    q, k, v = (x.transpose(0, 1).reshape(b * heads, -1, d) for x in (q, k, v))
    shares = torch.softmax(slopes.baddbmm(q, k.transpose(-1, -2)), -1)
    return torch.bmm(shares, v).view(heads, b, length, d).transpose(0, 1)


def values_of_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, slopes: Tensor) -> Tensor:
    """No product with a cache: with twice its numbers."""
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ (v * 2)


EXAMPLES: dict[str, tuple[Attend, int]] = {
    "eager": (eager, HEADS),
    "groups of heads": (eager, 2),
    "without a mask": (without_mask, HEADS),
    "bloom": (bloom, HEADS),
}
MISSES: dict[str, Attend] = {
    miss.__name__: miss
    for miss in (
        scaled_behind_the_sum, softcapped, shares_returned, scores_read_elsewhere, over_queries, log_shares,
        one_number_for_all_places, heads_of_other_rows, values_of_keys,
    )
}  # fmt: skip


def inputs(groups: int = HEADS, past: int = PAST, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(past)
    shapes = ((BATCH, 1, 32), *[(BATCH, groups, past, DEPTH)] * 2, (BATCH * HEADS, 1, past + 1))
    x, keys, values, slopes = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    mask = torch.zeros(1, 1, 1, past + 1, dtype=dtype)
    mask[..., 1] = torch.finfo(dtype).min
    return x, keys, values, mask, slopes


def step(attend: Attend, groups: int = HEADS) -> nn.Module:
    torch.manual_seed(0)
    return Step(attend, groups).eval()


@pytest.mark.parametrize("example", EXAMPLES)
def test_recognised(example: str) -> None:
    attend, groups = EXAMPLES[example]
    gm = after("fuse_caches", step(attend, groups), inputs(groups))
    found = count(gm)
    assert (found["grow"], found["cached_attention"], found["softmax"]) == (2, 1, 0)
    check_twice(gm, fuse_written_attention)


@pytest.mark.parametrize("miss", MISSES)
def test_not_taken_for_it(miss: str) -> None:
    found = count(after("fuse_caches", step(MISSES[miss]), inputs()))
    assert (found["cached_attention"], found["attention"], found["softmax"]) == (0, 0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("example", EXAMPLES)
def test_steps_of_any_length_are_eagers_in_one_region(example: str, dtype: torch.dtype) -> None:
    attend, groups = EXAMPLES[example]
    model = step(attend, groups).to(dtype)
    exact = copy.deepcopy(model).double()
    fast = zendnn_cffi.optimize(model, inputs(groups, dtype=dtype), tune="off")
    for past in (PAST, 9):
        given = inputs(groups, past, dtype)
        with torch.no_grad():
            results, plain = fast(*given), model(*given)
            expected = exact(*(each.double() for each in given))
        for result, other, reference in zip(results, plain, expected, strict=True):
            bound = 1.5 * (other - reference).abs().max() + (1e-6 if dtype is torch.float32 else 4e-3)
            assert (result - reference).abs().max() <= bound  # bf16: half a step of numbers up to 1
    assert len(fast.regions()) == 1 and len(fast.zen_region_0.programs.found) == 1
