"""Caches that grow, and the attention over them: which are recognised, and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_passes import ops
from fx_passes.fuse.caches import fuse_caches
from fx_passes.graph.free_sizes import growing_nodes, known_sizes
from tests.support.graphs import after, check_twice, count
from zendnn_cffi.backend import compiled_modules

HEADS, DEPTH = 4, 8
Attend = Callable[..., tuple[Tensor, ...]]


class Step(nn.Module):
    """One token x [B, 1, 32] and a cache of keys and values [B, G, S, 8]; attend gives the result and what is kept."""

    def __init__(self, attend: Attend, groups: int) -> None:
        super().__init__()
        self.attend = attend
        self.q, self.k, self.v = (nn.Linear(32, n * DEPTH) for n in (HEADS, groups, groups))

    def forward(self, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        if x.shape[0] > 99:  # a condition: torch.export follows it, symbolic tracing does not
            x = x * 1
        q, k, v = (m(x).view(x.shape[0], 1, -1, DEPTH).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.attend(q, k, v, *given)


def grown(past: Tensor, new: Tensor) -> Tensor:
    return torch.cat((past, new), 2)


def repeated(x: Tensor) -> Tensor:
    b, groups, s, d = x.shape
    return x[:, :, None, :, :].expand(b, groups, HEADS // groups, s, d).reshape(b, HEADS, s, d)


def plain(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, *mask: Tensor) -> tuple[Tensor, ...]:
    keys, values = grown(keys, k), grown(values, v)
    return F.scaled_dot_product_attention(q, keys, values, *mask), keys, values


def grouped(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    keys, values = grown(keys, k), grown(values, v)
    return F.scaled_dot_product_attention(q, repeated(keys), repeated(values)), keys, values


def not_kept(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    return plain(q, k, v, keys, values)[:1]


def new_ones_first(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    return plain(q, keys, values, k, v)


def keys_alone(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    result, keys, values = plain(q, k, v, keys, values)
    return result, keys, values * 2


def repeated_twice_read(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    keys, values = grown(keys, k), grown(values, v)
    wide = repeated(keys)
    return F.scaled_dot_product_attention(q, wide, repeated(values)), keys, values, wide * 1


EXAMPLES: dict[str, tuple[Attend, int, bool]] = {
    "plain": (plain, HEADS, False),
    "with a mask": (plain, HEADS, True),
    "groups of heads": (grouped, 2, False),
}
MISSES: dict[str, tuple[Attend, int, bool]] = {
    "caches that nobody keeps": (not_kept, HEADS, False),
    "the new ones first": (new_ones_first, HEADS, False),
    "keys are kept, values are not": (keys_alone, HEADS, False),
    "repeated heads that are read elsewhere": (repeated_twice_read, 2, False),
}


def fused(attend: Attend, groups: int, masked: bool) -> Any:
    cache = tuple(torch.randn(1, groups, 6, DEPTH) for _ in range(2))
    mask = (torch.ones(1, 1, 1, 7, dtype=torch.bool),) if masked else ()
    return after("fuse_caches", Step(attend, groups).eval(), (torch.randn(1, 1, 32), *cache, *mask))


@pytest.mark.parametrize("example", EXAMPLES)
def test_recognised(example: str) -> None:
    gm = fused(*EXAMPLES[example])
    found = count(gm)
    assert (found["grow"], found["cached_attention"], found["attention"]) == (2, 1, 0)
    (attention,) = gm.graph.find_nodes(op="call_function", target=ops.cached_attention)
    assert all(operand.target is ops.grow for operand in attention.args[1:3])
    assert attention.kwargs["enable_gqa"] == (example == "groups of heads")
    check_twice(gm, fuse_caches)


@pytest.mark.parametrize("example", EXAMPLES)
def test_nothing_else_grows(example: str) -> None:
    """The sizes that linear layers have are not free; of the others only the caches and the attention read one."""
    gm = fused(*EXAMPLES[example])
    known = known_sizes(gm)
    assert known is not None and len(known) <= 1  # the batch
    assert not {node for node in growing_nodes(gm) if node.target in ops.COMPUTE}


@pytest.mark.parametrize("miss", MISSES)
def test_not_taken_for_it(miss: str) -> None:
    found = count(fused(*MISSES[miss]))
    assert (found["cached_attention"], found["attention"]) == (0, 1)


def test_sizes_that_are_fixed_do_not_grow() -> None:
    """Traced symbolically, nothing is known of sizes."""

    class Plain(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
            return plain(q, k, v, keys, values)

    gm = after("fuse_caches", Plain().eval())
    assert known_sizes(gm) is None and not growing_nodes(gm) and not count(gm)["grow"]


@pytest.mark.parametrize("written", ["keys", "values", ""])
def test_grouped_caches_that_are_written_to_after_they_were_repeated(written: str) -> None:
    """The attention reads them as they were. TorchDynamo leaves the write in its graph."""

    def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        keys, values = grown(keys, k), grown(values, v)
        wide = repeated(keys), repeated(values)
        if written:
            (keys if written == "keys" else values).mul_(2)
        return F.scaled_dot_product_attention(q, *wide), keys, values

    model = Step(attend, 2).eval()
    given = torch.randn(1, 1, 32), *(torch.randn(1, 2, 6, DEPTH) for _ in range(2))
    torch._dynamo.reset()
    before = len(compiled_modules())
    with torch.no_grad():
        results = torch.compile(model, backend="zendnn", dynamic=True, options={"tune": "off"})(*given)
        for ours, theirs in zip(results, model(*given), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert sum(count(module)["cached_attention"] for module in compiled_modules()[before:]) == (not written)
