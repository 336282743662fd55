"""A decoding step whose key-value cache grows: one program for every length, equal to eager, whatever the mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.lower.attention import caches
from tests.support.lowering import noise, oracle
from tests.support.programs import run_poisoned
from tests.tolerance import assert_close

HEADS, DEPTH = 4, 16
WIDTH = HEADS * DEPTH
MASKS = ("none", "full", "some", "float")


class Step(nn.Module):
    """One attention layer over a cache [B, G, S, D] of keys and of values; returns the result and the grown cache.

    groups  heads that the cache has; each serves HEADS / groups queries, repeated as Hugging Face models do it
    """

    def __init__(self, groups: int = HEADS) -> None:
        super().__init__()
        self.groups = groups
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * DEPTH) for n in (HEADS, groups, groups))
        self.out = nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, DEPTH).transpose(1, 2)

    def repeated(self, x: Tensor) -> Tensor:
        b, groups, s, d = x.shape
        if groups == HEADS:
            return x
        return x[:, :, None, :, :].expand(b, groups, HEADS // groups, s, d).reshape(b, HEADS, s, d)

    def grown(self, cache: Tensor, x: Tensor) -> Tensor:
        return torch.cat((cache, self.heads(x)), 2)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        if x.shape[0] > 99:  # a condition: torch.export follows it, symbolic tracing does not
            x = x * 1
        keys, values = self.grown(keys, self.k(x)), self.grown(values, self.v(x))
        y = F.scaled_dot_product_attention(self.heads(self.q(x)), self.repeated(keys), self.repeated(values), mask)
        return self.out(y.transpose(1, 2).flatten(2)), keys, values


def mask_of(kind: str, batch: int, rows: int, length: int) -> tuple[Tensor, ...]:
    if kind == "none":
        return ()
    if kind == "full":
        return (torch.ones(batch, 1, rows, length, dtype=torch.bool),)
    if kind == "float":
        return (noise(batch, 1, rows, length),)
    kept = torch.rand(batch, 1, rows, length, generator=torch.Generator().manual_seed(length)) > 0.4
    kept[..., 0] = True
    return (kept,)


def cache_of(model: Step, batch: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    shape = (batch, model.groups, length, DEPTH)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def only_region(gm: Any) -> Any:
    (region,) = gm.regions().values()
    return region


def kinds(program: Any) -> list[str]:
    """What PyTorch computes; conversions are reorders, whoever makes them."""
    return [call.kind for call in program.calls if call.implementation == "torch" and call.kind != "reorder"]


@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("groups", (HEADS, 2, 1))
@pytest.mark.parametrize(("batch", "rows"), ((1, 1), (2, 1), (2, 3)))
@pytest.mark.parametrize("kind", MASKS)
def test_one_program_serves_a_growing_cache(
    kind: str, batch: int, rows: int, groups: int, dtype: torch.dtype | None
) -> None:
    model = Step(groups).eval()
    cache = cache_of(model, batch, 5)
    mine, given = cache, mask_of(kind, batch, rows, 5 + rows)
    with torch.no_grad():
        fast = zendnn_cffi.optimize(model, (noise(batch, rows, WIDTH), *cache, *given), dtype=dtype, tune="off")
        for step in range(4):
            x = noise(batch, rows, WIDTH, seed=step)
            given = mask_of(kind, batch, rows, 5 + (step + 1) * rows)
            expected = model(x, *cache, *given)
            before = [t.clone() for t in mine]
            actual = fast(x, *mine, *given)
            for ours, theirs in zip(actual, expected, strict=True):
                assert ours.dtype == theirs.dtype and ours.is_contiguous()
                assert_close(ours, theirs, dtype=dtype or torch.float32, k=WIDTH)
            assert all(map(torch.equal, mine, before)), "a step wrote to the cache it was given"
            cache, mine = expected[1:], actual[1:]
    (lowered,) = only_region(fast).lowered.values()
    assert kinds(lowered.program) == ["grow", "grow", "attention"]
    assert not [node for node in zendnn_cffi.explain(fast).nodes if not node.region and "attention" in node.name]


@pytest.mark.parametrize("length", (254, 255, 300))
@pytest.mark.parametrize("batch", (1, 3))
@pytest.mark.parametrize("kind", (*MASKS, "nothing left"))
def test_one_query_on_a_long_bf16_cache(kind: str, batch: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, from 256 rows on; nearer to the result in float64 than PyTorch's attention in bf16."""
    lengths: list[int] = []
    one_query = caches._one_query
    monkeypatch.setattr(caches, "_one_query", lambda q, k, *rest: lengths.append(k.shape[2]) or one_query(q, k, *rest))
    model = Step().eval().bfloat16()
    cache = tuple(t.bfloat16() for t in cache_of(model, batch, length))
    left = mask_of(kind, batch, 1, length + 1) if kind in MASKS else (torch.zeros(batch, 1, 1, length + 1).bool(),)
    given = tuple(t.bfloat16() if t.is_floating_point() else t for t in left)
    x = noise(batch, 1, WIDTH).bfloat16()
    with torch.no_grad():
        fast = zendnn_cffi.optimize(model, (x, *cache, *given), tune="off")
        actual = fast(x, *cache, *given)
        expected = oracle(model, (x, *cache, *given))
    assert lengths == ([length + 1] if length + 1 >= 256 else [])
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == torch.bfloat16 and not ours.isnan().any()
        assert_close(ours, theirs, dtype=torch.bfloat16, k=WIDTH)


def test_results_do_not_share_memory_with_later_ones() -> None:
    model = Step().eval()
    x, cache = noise(1, 1, WIDTH), cache_of(model, 1, 6)
    with torch.no_grad():
        fast = zendnn_cffi.optimize(model, (x, *cache), tune="off")
        first = fast(x, *cache)
        kept = [t.clone() for t in first]
        fast(noise(1, 1, WIDTH, seed=1), *first[1:])
        fast(noise(1, 1, WIDTH, seed=2), *cache)
    assert all(map(torch.equal, first, kept))


def test_caches_with_other_strides_and_an_empty_one() -> None:
    model = Step().eval()
    x, cache = noise(1, 1, WIDTH), cache_of(model, 1, 6)
    with torch.no_grad():
        fast = zendnn_cffi.optimize(model, (x, *cache), tune="off")
        strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in cache]
        for given in (cache, strided, [t[:, :, 1:4] for t in cache], [t[:, :, :0] for t in cache]):
            for ours, theirs in zip(fast(x, *given), model(x, *given), strict=True):
                assert_close(ours, theirs, k=WIDTH)
    programs = [lowered for lowered in only_region(fast).lowered.values() if lowered]
    assert len(programs) == 1, "an empty cache runs in plain PyTorch"


def test_dead_memory_is_not_read() -> None:
    model = Step().eval()
    x, cache = noise(1, 1, WIDTH), cache_of(model, 1, 6)
    with torch.no_grad():
        fast = zendnn_cffi.optimize(model, (x, *cache), tune="off")
        expected = fast(x, *cache)
    (lowered,) = only_region(fast).lowered.values()
    inputs = {
        node.name: value for node, value in zip(fast.graph.find_nodes(op="placeholder"), (x, *cache), strict=True)
    }
    names = [node.name for node in only_region(fast).graph.find_nodes(op="placeholder")]
    actual = {tuple(t.shape): t for t in run_poisoned(lowered.program, [inputs[name] for name in names])}
    assert torch.equal(actual[tuple(expected[0].shape)], expected[0])


class NotReturned(Step):
    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        return super().forward(x, keys, values, mask)[:1]


class InFront(Step):
    def grown(self, cache: Tensor, x: Tensor) -> Tensor:
        return torch.cat((self.heads(x), cache), 2)


class Doubled(Step):
    def grown(self, cache: Tensor, x: Tensor) -> Tensor:
        return torch.cat((cache, cache, self.heads(x)), 2)


class Wide(Step):
    def grown(self, cache: Tensor, x: Tensor) -> Tensor:
        return torch.cat((cache, self.heads(x).double()), 2).float()


@pytest.mark.parametrize("kind", (NotReturned, InFront, Doubled, Wide))
def test_other_caches_stay_outside(kind: type[Step]) -> None:
    model = kind().eval()
    x, cache = noise(1, 1, WIDTH), cache_of(model, 1, 6)
    with torch.no_grad():
        fast = zendnn_cffi.optimize(model, (x, *cache), tune="off")
        for length in (6, 7, 9):
            given = cache_of(model, 1, length, seed=length)
            for ours, theirs in zip(fast(x, *given), model(x, *given), strict=True):
                assert_close(ours, theirs, dtype=torch.float32, k=WIDTH)
    for region in fast.regions().values():
        assert all(lowered and kinds(lowered.program) == [] for lowered in region.lowered.values())


@pytest.mark.parametrize("kind", ("full", "some"))
def test_a_mask_that_leaves_nothing_out_is_not_read(kind: str) -> None:
    model = Step().eval()
    x, cache, given = noise(1, 1, WIDTH), cache_of(model, 1, 6), mask_of(kind, 1, 1, 7)
    with torch.no_grad():
        fast = zendnn_cffi.optimize(model, (x, *cache, *given), tune="off")
        fast(x, *cache, *given)
    (lowered,) = only_region(fast).lowered.values()
    (attention,) = (call for call in lowered.program.calls if call.kind == "attention")
    assert len(attention.srcs) == (3 if kind == "full" else 4)
