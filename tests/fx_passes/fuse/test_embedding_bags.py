"""Bags that are concatenated, and what only looks like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import ops
from fx_passes.fuse.embedding_bags import fuse_embedding_bags
from tests.support.graphs import after, calls, check, check_twice, count, image, model_of

cat = torch.cat


def bags(number: int = 3, width: int = 5, mode: str = "sum", **options: Any) -> dict[str, nn.Module]:
    return {f"t{i}": nn.EmbeddingBag(7 + i, width, mode=mode, **options) for i in range(number)}


def indices(*shape: int) -> torch.Tensor:
    return torch.randint(0, 7, shape or (4, 3, 2), generator=torch.Generator().manual_seed(0))


def fused(gm: Any) -> list[Any]:
    return [node for node in calls(gm) if node.target is ops.embedding_bags]


EXAMPLES: dict[str, tuple[Callable[..., Any], tuple[int, bool]]] = {  # forward(m, x, s), (pieces beside, one tensor)
    "slices": (lambda m, x, s: cat([m.t0(s[:, 0]), m.t1(s[:, 1]), m.t2(s[:, 2])], 1), (0, True)),
    "last dim": (lambda m, x, s: cat([m.t0(s[:, 0]), m.t1(s[:, 1]), m.t2(s[:, 2])], -1), (0, True)),
    "whole slices": (lambda m, x, s: cat([x, m.t0(s[:, 0, :]), m.t1(s[:, 1, :])], 1), (1, True)),
    "from the second": (lambda m, x, s: cat([x, m.t0(s[:, 1]), m.t1(s[:, 2])], 1), (1, True)),
    "another order": (lambda m, x, s: cat([m.t0(s[:, 1]), m.t1(s[:, 0]), x], 1), (1, False)),
    "other tensors": (lambda m, x, s: cat([m.t0(s[:, 0]), m.t1(s[:, 1] // 2), x], 1), (1, False)),
    "one table twice": (lambda m, x, s: cat([m.t0(s[:, 0]), m.t0(s[:, 1])], 1), (0, True)),
    "several lengths": (lambda m, x, s: cat([m.t0(s[:, 0]), m.t1(s[:, 1, :1])], 1), (0, False)),
    "a piece between": (lambda m, x, s: cat([m.t0(s[:, 0]), x, m.t1(s[:, 1]), m.t2(s[:, 2])], 1), (2, True)),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_fuses(name: str) -> None:
    forward, (beside, stacked) = EXAMPLES[name]
    model = model_of(forward, **bags())
    gm = check(model, image(4, 6), indices())
    assert count(gm)["embedding_bags"] == 1 and count(gm)["concat"] == 0
    [node] = fused(gm)
    assert len(node.args[3]) + len(node.args[4]) == beside
    assert isinstance(node.args[1], tuple) != stacked
    check_twice(after("fuse_embedding_bags", model), fuse_embedding_bags)


def rows(number: int = 3, width: int = 5, **options: Any) -> dict[str, nn.Module]:
    return {f"t{i}": nn.Embedding(7 + i, width, **options) for i in range(number)}


def functional(m: Any, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return cat([x, F.embedding(s[:, 0, 1], m.t0.weight), F.embedding(s[:, 2, 1], m.t1.weight)], 1)


def slices(m: Any, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    t = s[:, :, 0]
    return cat([m.t0(t[:, 0]), m.t1(t[:, 1]), m.t2(t[:, 2])], 1)


LOOKUPS: dict[str, Callable[..., Any]] = {
    "slices": slices,
    "functional": functional,
    "three dimensions": lambda m, x, s: cat([m.t0(s[:, 0]), m.t1(s[:, 1])], 1),
    "last of two": lambda m, x, s: cat([m.t0(s[:, 0, 1]), m.t1(s[:, 1, 1]), x.flatten(1)], -1),
}


@pytest.mark.parametrize("options", ({}, {"padding_idx": 1}), ids=str)
@pytest.mark.parametrize("name", LOOKUPS)
def test_rows_in_place_of_bags(name: str, options: dict[str, Any]) -> None:
    model = model_of(LOOKUPS[name], **rows(**options))
    gm = check(model, image(4, 6), indices())
    [node] = fused(gm)
    assert node.args[2] == "row" and isinstance(node.args[1], tuple) == (name in ("functional", "last of two"))
    assert not [n for n in calls(gm) if n.op == "call_module" or n.target is F.embedding]
    check_twice(after("fuse_embedding_bags", model), fuse_embedding_bags)


def test_rows_of_several_lengths() -> None:
    tables = {f"t{i}": nn.Embedding(7 + i, 5 + i % 2) for i in range(4)}
    model = model_of(lambda m, x, s: cat([x, *(m.get_submodule(f"t{i}")(s[:, i]) for i in range(4))], 1), **tables)
    gm = check(model, image(6, 3), indices(6, 4))
    [node] = fused(gm)
    assert node.args[2] == "row" and len(node.args[0]) == 4 and isinstance(node.args[1], torch.fx.Node)


def writer(m: Any, s: torch.Tensor) -> Any:
    m.t0.weight.data.mul_(1.0)
    return cat([m.t0(s[:, 0]), m.t1(s[:, 1])], 1)


ROWS_REFUSED: dict[str, tuple[Callable[..., Any], dict[str, nn.Module]]] = {
    "joined along a dimension nobody knows": (lambda m, s: cat([m.t0(s[:, 0]), m.t1(s[:, 1])], -1), rows()),
    "renormalized": (lambda m, s: cat([m.t0(s[:, 0]), m.t1(s[:, 1])], 1), rows(max_norm=100.0)),
    "something is written": (writer, rows()),
    "no columns": (lambda m, s: cat([m.t0(s[:, 0, 0]), m.u(s[:, 1, 0])], 1), {**rows(), "u": nn.Embedding(9, 0)}),
    "rows and bags": (lambda m, s: cat([m.t0(s[:, 0, 0]), m.u(s[:, 1])], 1), {**rows(), "u": nn.EmbeddingBag(9, 5)}),
}


@pytest.mark.parametrize("name", ROWS_REFUSED)
def test_refuses_rows(name: str) -> None:
    forward, children = ROWS_REFUSED[name]
    assert not fused(check(model_of(forward, **children), indices()))


def test_refuses_a_module_with_hooks() -> None:
    model = model_of(lambda m, s: cat([m.t0(s[:, 0]), m.t1(s[:, 1])], 1), **rows())
    model.t0.register_forward_hook(lambda module, given, result: result * 2)
    assert not fused(check(model, indices()))


@pytest.mark.parametrize("mode", ("sum", "mean"))
def test_both_modes(mode: str) -> None:
    model = model_of(lambda m, s: cat([m.t0(s[:, 0]), m.t1(s[:, 1])], 1), **bags(mode=mode))
    assert [node.args[2] for node in fused(check(model, indices()))] == [mode]


def twice(m: Any, s: torch.Tensor) -> Any:
    a, b = m.t0(s[:, 0]), m.t1(s[:, 1])
    return cat([a, b], 1), a, b


def written(m: Any, s: torch.Tensor) -> Any:
    s = s.clone()
    a, b = m.t0(s[:, 0]), m.t1(s[:, 1])
    s.fill_(0)
    return cat([a, b], 1), s


def ragged(m: Any, s: torch.Tensor) -> Any:
    offsets = torch.arange(4) * 2
    return cat([m.t0(s[:, 0].flatten(), offsets), m.t1(s[:, 1].flatten(), offsets)], 1)


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, nn.Module]]] = {
    "rows joined": (lambda m, s: cat([m.t0(s[:, 0]), m.t1(s[:, 1])], 0), bags()),
    "one bag": (lambda m, s: cat([m.t0(s[:, 0]), m.t0.weight[:4]], 1), bags()),
    "read elsewhere": (twice, bags()),
    "used twice": (lambda m, s: (lambda a: cat([a, a], 1))(m.t0(s[:, 0])), bags()),
    "written between": (written, bags()),
    "offsets": (ragged, bags()),
    "maxima": (lambda m, s: cat([m.t0(s[:, 0]), m.t1(s[:, 1])], 1), bags(mode="max")),
    "padding index": (lambda m, s: cat([m.t0(s[:, 0]), m.t1(s[:, 1])], 1), bags(padding_idx=1)),
    "weights of samples": (
        lambda m, s: cat(
            [F.embedding_bag(s[:, i], m.t0.weight, mode="sum", per_sample_weights=s[:, i].double()) for i in (0, 1)], 1
        ),
        bags(),
    ),
    "computed table": (
        lambda m, s: cat([F.embedding_bag(s[:, i], s.double().flatten(1).T.repeat(2, 1)) for i in (0, 1)], 1),
        bags(),
    ),
    "row lengths": (
        lambda m, s: cat([m.t0(s[:, 0]), m.u0(s[:, 1])], 1),
        {**bags(), "u0": nn.EmbeddingBag(9, 6, mode="sum")},
    ),
    "modes": (
        lambda m, s: cat([m.t0(s[:, 0]), m.u0(s[:, 1])], 1),
        {**bags(), "u0": nn.EmbeddingBag(9, 5, mode="mean")},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    forward, children = REFUSED[name]
    gm = check(model_of(forward, **children), indices())
    assert not fused(gm)
    assert all(node.meta["reason"] for node in calls(gm) if node.target is ops.embedding_bag)
