"""Attention of single queries reads grouped keys and values where they lie; near misses are repeated as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
import zendnn_cffi.backend
from tests.support.lowering import noise
from tests.tolerance import assert_close

B, G, R, S, D = 2, 3, 2, 11, 8


def repeated(x: Tensor, times: int) -> Tensor:
    b, heads, length, d = x.shape
    return x[:, :, None].expand(b, heads, times, length, d).reshape(b, heads * times, length, d)


class Step(nn.Module):
    """A step of a decoder layer with caches that it writes to, or is given as they are."""

    def __init__(self, how: str = "", times: int = R, features: int = G * R * D) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(features, G * times * D), nn.Linear(features, G * D), nn.Linear(8, 8)
        self.how, self.times = how, times

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, place: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.q(x).unflatten(-1, (G * self.times, D)).transpose(1, 2)
        if self.how != "given":
            new = self.kv(x).unflatten(-1, (G, D)).transpose(1, 2)
            keys.index_copy_(2, place, new)
            values.index_copy_(2, place, new * 2)
        k, v = repeated(keys, self.times), values if self.how == "keys alone" else repeated(values, self.times)
        if self.how == "keys alone":
            v = v.repeat_interleave(self.times, 1)
        if self.how == "written":
            keys.zero_()
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.how == "causal")
        if self.how == "read":
            found = found + k.sum()
        return self.out(found)


def inputs(length: int, mask: str = "") -> list[Any]:
    keys, values = noise(B, G, S, D), noise(B, G, S, D, seed=1)
    given = [noise(B, length, G * R * D, seed=2), keys, values, torch.arange(5, 5 + length)]
    if mask:
        rows = G * R if mask == "heads" else 1
        allowed = torch.arange(S) <= torch.arange(rows)[:, None] % 3 + 4
        given.append(allowed[None, :, None].expand(B, rows, length, S))
    return given


def fast_of(model: nn.Module, entry: str, given: list[Any]) -> tuple[Any, Any]:
    if entry == "optimize":
        exported = torch.export.export(model, tuple(x.clone() for x in given))  # whose shapes are known
        fast = zendnn_cffi.optimize(exported, tune="off")
        return fast, fast
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="zendnn", options={"tune": "off"})
    compiled(*[x.clone() for x in given])
    return compiled, zendnn_cffi.backend.compiled_modules()[-1]


def repeats(fast: Any) -> int:
    """How many times heads are repeated in memory, outside of regions or inside."""
    graphs = [fast.graph, *(region.graph for region in fast.regions().values())]
    named = [getattr(node.target, "__name__", str(node.target)) for graph in graphs for node in graph.nodes]
    return sum(name.partition(".")[0] == "expand" for name in named)


def check(model: nn.Module, entry: str, length: int, mask: str = "") -> Any:
    given = inputs(length, mask)
    with torch.no_grad():
        fast, behind = fast_of(model, entry, given)
        for _ in range(2):
            ours, theirs = [x.clone() for x in given], [x.clone() for x in given]
            assert_close(fast(*ours), model(*theirs), k=S)
            for mine, other in zip(ours, theirs, strict=True):
                assert_close(mine, other, k=64)
            given[3] = given[3] + 1
    return behind


@pytest.mark.parametrize("mask", ["", "one row"])
@pytest.mark.parametrize("how", ["", "given"])
@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
def test_nothing_is_repeated(entry: str, how: str, mask: str) -> None:
    assert repeats(check(Step(how).eval(), entry, 1, mask)) == 0


@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
@pytest.mark.parametrize(
    ("how", "length", "mask", "count"),
    [
        ("", 2, "", 2),
        ("", 1, "heads", 2),
        ("causal", 1, "", 2),
        ("written", 1, "", 2),
        ("read", 1, "", 2),
        ("keys alone", 1, "", 1),
    ],
)
def test_near_misses(entry: str, how: str, length: int, mask: str, count: int) -> None:
    assert repeats(check(Step(how).eval(), entry, length, mask)) >= count


@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
def test_many_rows_of_one_head(entry: str) -> None:
    """Multi-query attention: all heads of queries read one of keys."""
    model = Step(times=4, features=G * R * D).eval()
    assert repeats(check(model, entry, 1, "one row")) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_bf16(dtype: torch.dtype) -> None:
    model = Step().eval().to(dtype)
    given = [x.to(dtype) if x.is_floating_point() else x for x in inputs(1, "one row")]
    with torch.no_grad():
        fast, behind = fast_of(model, "torch.compile", given)
        exact = Step().eval().double()
        exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
        ours = fast(*[x.clone() for x in given])
        theirs = exact(*[x.double() if x.is_floating_point() else x.clone() for x in given])
        assert_close(ours, theirs.to(dtype), k=S)
    assert repeats(behind) == 0
