"""Constants per channel, in the weights of the layer before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from fx_passes.fold.channel_scale import fold_channel_scale
from tests.support.graphs import after, check, check_twice, count, image, model_of

SCALES: dict[str, tuple[Callable[..., Any], tuple[int, ...], int]] = {
    "convolution": (lambda m, x: m.c(x) * m.k, (4, 1, 1), 0),
    "convolution, with a batch dimension of one": (lambda m, x: m.k * m.c(x), (1, 4, 1, 1), 1),
    "sum": (lambda m, x: m.k + m.c(x), (4, 1, 1), 0),
    "both": (lambda m, x: (m.c(x) + m.k) * m.k, (4, 1, 1), 0),
    "without bias": (lambda m, x: m.b(x) * m.k + m.k, (4, 1, 1), 0),
    "linear": (lambda m, x: m.l(x) * m.k, (4,), 0),
    "linear behind a permute": (lambda m, x: m.k * m.l(x).permute(0, 3, 1, 2), (4, 1, 1), 0),
    "the wrong dimension": (lambda m, x: m.k * m.l(x).permute(0, 1, 2, 3), (4, 1, 1), 1),
    "one per column": (lambda m, x: m.c(x)[..., :4] * m.k, (4,), 1),
    "division": (lambda m, x: m.c(x) / m.k, (4, 1, 1), 1),
    "a second reader": (lambda m, x: ((y := m.c(x)) * m.k, y), (4, 1, 1), 1),
}


@pytest.mark.parametrize("case", SCALES)
def test_channel_scale(case: str) -> None:
    function, shape, left = SCALES[case]
    size = 4 if case == "the wrong dimension" else 5
    model = model_of(function, c=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1, bias=False), l=nn.Linear(7, 4))
    model.k = nn.Parameter(image(*shape))
    gm = check(model, image(2, 3 if size == 5 else 4, size, 7))
    absorbed = sum(("binary" in str(n.kwargs.get("post_ops"))) for r in gm.regions().values() for n in r.graph.nodes)
    assert count(gm)["binary"] + absorbed == left
    check_twice(after("fold_channel_scale", model), fold_channel_scale)


@pytest.mark.parametrize("layer", [nn.Linear(5, 4), nn.Conv1d(5, 4, 1)])
def test_a_constant_of_more_dimensions_than_the_value_stays(layer: nn.Module) -> None:
    """It would give the result these dimensions."""
    channels = (1, 4) if isinstance(layer, nn.Linear) else (1, 4, 1)
    model = model_of(lambda m, x: m.c(x) * m.w, c=layer)
    model.register_buffer("w", image(*channels))
    check(model, image(5) if isinstance(layer, nn.Linear) else image(5, 7))
    assert count(after("fold_channel_scale", model))["binary"] == 1


@pytest.mark.parametrize("kind", ["mul", "add"])
@pytest.mark.parametrize("layer", [nn.Linear(7, 1), nn.Conv2d(3, 1, 1)])
def test_one_channel_and_a_constant_of_several_stay(layer: nn.Module, kind: str) -> None:
    model = model_of(lambda m, x: m.c(x) * m.k if kind == "mul" else m.c(x) + m.k, c=layer)
    model.k = nn.Parameter(image(*((8,) if isinstance(layer, nn.Linear) else (8, 1, 1))))
    check(model, image())
    assert count(after("fold_channel_scale", model))["binary"] == 1


@pytest.mark.parametrize("kind", ["mul", "add"])
def test_a_bias_that_is_a_matrix_stays(kind: str) -> None:
    """Its columns are the channels."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = F.linear(x, m.w, m.b)
        return y * m.k if kind == "mul" else y + m.k

    model = model_of(forward)
    model.w, model.b, model.k = (nn.Parameter(image(*shape)) for shape in ((4, 7), (4, 4), (4,)))
    check(model, image(4, 7))
    assert count(after("fold_channel_scale", model))["binary"] == 1
