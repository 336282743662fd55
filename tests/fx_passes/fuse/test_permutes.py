"""Permutes pass element-wise operations, and each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fx_passes.fuse.permutes import fuse_permutes, inverse
from tests.support.graphs import after, check, check_twice, count, image, model_of, post_ops

BACK = (0, 3, 1, 2)


def _block(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.l(x.permute(0, 2, 3, 1)).permute(BACK)
    return x.relu().permute(0, 1, 2, 3) + y


def _two_blocks(m: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = m.l(m.c(x).permute(0, 2, 3, 1)).permute(BACK) * 2 + x.permute(0, 2, 3, 1).permute(BACK)
    return x


FUSED: dict[str, tuple[Callable[..., Any], list[tuple[str, ...]]]] = {
    "activation": (lambda m, x: m.l(x).permute(BACK).relu(), [("eltwise:relu",)]),
    "number": (lambda m, x: (m.l(x).permute(BACK) * 2).tanh(), [("eltwise:linear", "eltwise:tanh")]),
    "negative dimensions": (lambda m, x: m.l(x).permute(0, -1, 1, -2).relu(), [("eltwise:relu",)]),
    "residual": (_block, [("binary:add",)]),
    "residuals": (_two_blocks, [(), ("eltwise:linear", "binary:add")] * 2),
    "reversed": (
        lambda m, x: x.permute(0, 1, 2, 3) - m.l(x.permute(0, 2, 3, 1)).permute(BACK),
        [("eltwise:linear", "binary:add")],
    ),
}


@pytest.mark.parametrize("case", FUSED)
def test_passes(case: str) -> None:
    function, expected = FUSED[case]
    size = 3 if case in ("residual", "residuals", "reversed") else 7
    model = model_of(function, l=nn.Linear(size, size), c=nn.Conv2d(3, 3, 1))
    gm = check(model, image(2, 3, 5, 7))
    assert post_ops(gm) == expected
    check_twice(after("fuse_permutes", model), fuse_permutes)


def test_of_two_blocks_the_residual_is_not_permuted() -> None:
    gm = check(model_of(_two_blocks, l=nn.Linear(3, 3), c=nn.Conv2d(3, 3, 1)), image(2, 3, 5, 7))
    (first, second) = [n for r in gm.regions().values() for n in r.graph.nodes if "linear" in str(n.target)]
    assert second.kwargs["post_ops"][1][2] is first


REFUSED: dict[str, Callable[..., Any]] = {
    "rank of the other unknown": lambda m, x: m.l(x).permute(BACK) + m.k,
    "a second reader of the permute": lambda m, x: ((y := m.l(x).permute(BACK)).relu(), y),
    "a second reader of the linear": lambda m, x: ((y := m.l(x)).permute(BACK).relu(), y),
}


@pytest.mark.parametrize("why", REFUSED)
def test_stays(why: str) -> None:
    model = model_of(REFUSED[why], l=nn.Linear(7, 7))
    model.k = nn.Parameter(image(7))
    gm = check(model, image(2, 7, 7, 7))
    assert post_ops(gm) == [()]


def test_inverse() -> None:
    assert inverse((0, 3, 1, 2)) == (0, 2, 3, 1) and inverse((0, -1, 1, -2)) == (0, 2, 3, 1)


def test_pairs_cancel() -> None:
    gm = check(model_of(lambda m, x: m.c(x).permute(1, 0, 2, 3).permute(1, 0, 2, 3), c=nn.Conv2d(3, 3, 1)), image())
    assert count(gm) == {"convolution": 1}
    gm = check(model_of(lambda m, x: m.c(x).permute(1, 2, 3, 0).permute(1, 0, 2, 3), c=nn.Conv2d(3, 3, 1)), image())
    assert count(gm) == {"convolution": 1, "permute": 1}
