"""Sizes and ranks: asked of the earliest tensor that has them, assertions that hold dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fx_passes.fold.shapes import fold_shapes
from tests.support.graphs import after, check, check_twice, image, model_of, name_of, outside


def test_sizes_are_answered_and_assertions_that_hold_dropped() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.c(x).flatten(1)
        torch._assert(y.dim() == 2, "a matrix")
        return y.relu().reshape(y.relu().size(0), -1, 3)

    model = model_of(forward, c=nn.Conv2d(3, 3, 1))
    gm = check(model, image())
    assert not outside(gm) and len(gm.regions()) == 1
    check_twice(after("fold_shapes", model), fold_shapes)


def test_assertions_about_inputs_stay() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        torch._assert(x.shape[1] == 3, "three channels")
        return m.c(x)

    gm = check(model_of(forward, c=nn.Conv2d(3, 3, 1)), image())
    with pytest.raises(AssertionError, match="three channels"):
        gm(image(1, 4, 2, 2))


def test_what_is_asserted_of_every_layer_is_asked_of_the_input_once() -> None:
    """timm asserts four dimensions in each normalization: asked there, each layer's result would leave the region."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        for layer in (m.a, m.b, m.c):
            x = layer(x)
            torch._assert(x.ndim == 4, f"expected 4 dimensions, got {x.ndim}")
            x = torch.cat([x.relu() + x, x * x.mean((2, 3), keepdim=True)], 1)
        return x

    model = model_of(forward, a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(8, 4, 3), c=nn.Conv2d(8, 4, 1))
    gm = check(model, image())
    assert outside(gm) == {"rank": 1, "eq": 1, "_assert": 1}
    assert all(len(n.all_input_nodes) == 1 and n.all_input_nodes[0].op == "placeholder"
               for n in gm.graph.nodes if name_of(n) == "rank")  # fmt: skip
    with pytest.raises(AssertionError, match="4 dimensions"):
        gm(image(3, 9, 7))


def test_different_questions_stay_apart() -> None:
    """Of values that need not have as many dimensions, and in arithmetic that gives another kind of number."""

    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        torch._assert(x.ndim >= 2, "x")
        torch._assert(y.ndim >= 2, "y")
        total = x + y
        return m.a(x) + y, x.ndim + 1, x.ndim + 1.0, total.ndim * 2, (total * 2).ndim * 2

    asked = outside(check(model_of(forward, a=nn.Conv2d(3, 3, 1)), image(), image(1, 2, 3, 9, 7)))
    assert (asked["rank"], asked["ge"], asked["_assert"], asked["add"], asked["mul"]) == (3, 2, 2, 2, 1)


@pytest.mark.parametrize("resize", (lambda x: x.unsqueeze_(0), lambda x: x.t_(), lambda x: x.resize_(6, 4)))
@pytest.mark.parametrize("question", (lambda x: x.size(0), lambda x: x.dim(), lambda x: x.shape[-1] * 2))
def test_what_is_resized_in_place_is_asked_again(
    resize: Callable[[torch.Tensor], Any], question: Callable[[torch.Tensor], Any]
) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = m.a(x).relu()
        before = question(x), question(x.relu())
        resize(x)
        return y, before, question(x), question(x.relu()), question(y)

    check(model_of(forward, a=nn.Linear(6, 6)), image(4, 6))
