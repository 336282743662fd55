"""Bags between offsets that are concatenated, and what only looks like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import ops
from fx_passes.fuse.offset_bags import fuse_offset_bags
from tests.support.graphs import after, calls, check, check_twice, count, image, model_of

cat = torch.cat


def bags(number: int = 3, width: int = 5, mode: str = "sum", **options: Any) -> dict[str, nn.Module]:
    return {f"t{i}": nn.EmbeddingBag(7 + i, width, mode=mode, **options) for i in range(number)}


def inputs() -> tuple[torch.Tensor, ...]:
    """Features [4, 6], offsets [3, 4], indices of three tables."""
    generator = torch.Generator().manual_seed(0)
    flat = [torch.randint(0, 7, (n,), generator=generator) for n in (8, 8, 5)]
    return image(4, 6), torch.tensor([[0, 2, 4, 6], [0, 0, 7, 7], [0, 1, 2, 3]]), *flat


EXAMPLES: dict[str, tuple[Callable[..., Any], tuple[int, bool]]] = {  # (pieces beside, offsets in one tensor)
    "rows": (lambda m, x, o, i, j, k: cat([x, m.t0(i, o[0]), m.t1(j, o[1]), m.t2(k, o[2])], 1), (1, True)),
    "first rows": (lambda m, x, o, i, j, k: cat([m.t0(i, o[0]), m.t1(j, o[1]), x], -1), (1, True)),
    "other rows": (lambda m, x, o, i, j, k: cat([x, m.t0(j, o[1]), m.t1(k, o[2])], 1), (1, False)),
    "tensors": (lambda m, x, o, i, j, k: cat([x, m.t0(i, o[0] * 1), m.t1(j, o[1] * 1)], 1), (1, False)),
    "one of both": (lambda m, x, o, i, j, k: cat([m.t0(i, o[0]), m.t1(i, o[0])], 1), (0, False)),
    "one table twice": (lambda m, x, o, i, j, k: cat([m.t0(i, o[0]), m.t0(j, o[1])], 1), (0, True)),
    "a piece between": (lambda m, x, o, i, j, k: cat([m.t0(i, o[0]), x, m.t1(j, o[1]), m.t2(k, o[2])], 1), (2, False)),
    "functional": (
        lambda m, x, o, i, j, k: cat(
            [F.embedding_bag(a, t.weight, b, mode="mean") for a, t, b in ((i, m.t0, o[0]), (j, m.t1, o[1]))], 1
        ),
        (0, True),
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_fuses(name: str) -> None:
    forward, (beside, in_one) = EXAMPLES[name]
    model = model_of(forward, **bags())
    gm = after("fuse_offset_bags", model)
    [fused] = [node for node in calls(gm) if node.target is ops.offset_bags]
    [concat] = [node for node in calls(gm) if node.target is ops.concat_bags]
    assert len(concat.args[1]) + len(concat.args[2]) == beside and isinstance(fused.args[2], tuple) != in_one
    check_twice(gm, fuse_offset_bags)
    found = count(check(model, *inputs()))
    assert found["offset_bags_0"] == found["concat_bags"] == 1 and not found["concat"]
    assert found["embedding_bag"] == (name == "a piece between")  # the one before it stays by itself


@pytest.mark.parametrize("mode", ("sum", "mean"))
@pytest.mark.parametrize("last", (False, True))
def test_modes_and_last_offsets(mode: str, last: bool) -> None:
    children = bags(mode=mode, include_last_offset=last)
    model = model_of(lambda m, x, o, i, j: cat([m.t0(i, o[0]), m.t1(j, o[1])], 1), **children)
    flat = torch.arange(6)
    offsets = torch.tensor([[0, 2, 3, 6], [0, 0, 5, 6]])
    assert count(check(model, image(4, 6), offsets, flat, flat))["offset_bags_0"] == 1


def twice(m: Any, x: Any, o: Any, i: Any, j: Any, k: Any) -> Any:
    a, b = m.t0(i, o[0]), m.t1(j, o[1])
    return cat([a, b], 1), a, b


def written(m: Any, x: Any, o: Any, i: Any, j: Any, k: Any) -> Any:
    o = o.clone()
    a, b = m.t0(i, o[0]), m.t1(j, o[1])
    o.fill_(0)
    return cat([a, b], 1), o


def weighted(m: Any, x: Any, o: Any, i: Any, j: Any, k: Any) -> Any:
    return cat([F.embedding_bag(i, m.t0.weight, o[t], mode="sum", per_sample_weights=i.double()) for t in (0, 1)], 1)


def plain(m: Any, x: Any, o: Any, i: Any, j: Any, k: Any) -> Any:
    return cat([m.t0(i, o[0]), m.t1(j, o[1])], 1)


def other(m: Any, x: Any, o: Any, i: Any, j: Any, k: Any) -> Any:
    return cat([m.t0(i, o[0]), m.u(j, o[1])], 1)


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, nn.Module], str]] = {
    "rows joined": (lambda m, x, o, i, j, k: cat([m.t0(i, o[0]), m.t1(j, o[1])], 0), bags(), "not concatenated"),
    "one bag": (lambda m, x, o, i, j, k: cat([m.t0(i, o[0]), x], 1), bags(), "not concatenated"),
    "read elsewhere": (twice, bags(), "not concatenated"),
    "written between": (written, bags(), "not concatenated"),
    "maxima": (plain, bags(mode="max"), "mode max"),
    "padding index": (plain, bags(padding_idx=1), "padding index"),
    "weights of samples": (weighted, bags(), "weights for samples"),
    "row lengths": (other, {**bags(), "u": nn.EmbeddingBag(9, 6, mode="sum")}, "not concatenated"),
    "modes": (other, {**bags(), "u": nn.EmbeddingBag(9, 5, mode="mean")}, "not concatenated"),
    "of fixed length": (
        lambda m, x, o, i, j, k: cat([m.t0(i, o[0]), m.t1(i.view(4, 2))], 1),
        bags(),
        "not concatenated",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    forward, children, reason = REFUSED[name]
    gm = check(model_of(forward, **children), *inputs())
    left = [node for node in calls(gm) if node.target is ops.embedding_bag]
    assert left and all(reason in node.meta["reason"] for node in left)
    assert not count(gm)["concat_bags"]
