"""Pads that belong to the convolution or pooling behind them, and those that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from fx_passes.fold.pad import fold_pad
from fx_passes.pipeline import compile_graph
from tests.support.graphs import after, check, check_twice, count, image, model_of, outside

PADS: dict[str, tuple[Callable[..., Any], int]] = {
    "into a convolution": (lambda m, x: m.c(F.pad(x, (1, 2, 0, 3))), 0),
    "one dimension only": (lambda m, x: m.c(F.pad(x, (1, 2))), 0),
    "a module": (lambda m, x: m.c(m.z(x)), 0),
    "average that counts padding": (lambda m, x: F.avg_pool2d(F.pad(x, (1, 0, 1, 0)), 3, 2), 0),
    "its own padding too": (lambda m, x: F.avg_pool2d(F.pad(x, (1, 0, 1, 0)), 3, 2, 1), 0),
    "half of a window": (lambda m, x: F.avg_pool2d(F.pad(x, (2, 2, 1, 1)), (3, 4), 1), 0),
    "more than half of a window": (lambda m, x: F.avg_pool2d(F.pad(x, (2, 2, 2, 2)), 3, 1), 1),
    "more than half with its own": (lambda m, x: F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 1, 1), 1),
    "more than half on one side": (lambda m, x: F.avg_pool2d(F.pad(x, (0, 2, 0, 2)), 3, 1), 0),
    "not zero": (lambda m, x: m.c(F.pad(x, (1, 2, 0, 3), value=1.0)), 1),
    "channels": (lambda m, x: m.c(F.pad(x, (0, 0, 0, 0, 1, 0))[:, 1:]), 1),
    "cropping": (lambda m, x: m.c(F.pad(x, (-1, 2, 0, 3))), 1),
    "maximum": (lambda m, x: F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3), 1),
    "average that does not count its own": (lambda m, x: F.avg_pool2d(F.pad(x, (1, 1)), 3, 2, 1, False, False), 1),
    "average with ceil_mode": (lambda m, x: F.avg_pool2d(F.pad(x, (1, 1)), 3, 2, ceil_mode=True), 1),
    "a second reader": (lambda m, x: (m.c(y := F.pad(x, (1, 1))), y), 1),
}


@pytest.mark.parametrize("case", PADS)
def test_pad(case: str) -> None:
    function, left = PADS[case]
    model = model_of(function, c=nn.Conv2d(3, 4, 3, stride=2), z=nn.ZeroPad2d((1, 2, 3, 0)))
    assert count(check(model, image()))["pad"] == left
    check_twice(after("fold_pad", model), fold_pad)


def _write_between(m: Any, x: Tensor) -> Tensor:
    """The padded copy does not change with what it is a copy of."""
    h = F.relu(x)
    padded = F.pad(h, (1, 1, 1, 1))
    h[:, 0] = 9.0
    result: Tensor = m.c(padded)
    return result


def _write_before(m: Any, x: Tensor) -> Tensor:
    h = F.relu(x)
    h[:, 0] = 9.0
    result: Tensor = m.c(F.pad(h, (1, 1, 1, 1)))
    return result


@pytest.mark.parametrize(("function", "left"), ((_write_between, 1), (_write_before, 0)))
def test_writes_to_what_is_padded(function: Callable[..., Any], left: int) -> None:
    assert count(check(model_of(function, c=nn.Conv2d(3, 4, 3)), image()))["pad"] == left


@pytest.mark.parametrize("sides", ((1, 1), (0, 2)))
def test_an_own_padding_that_eager_refuses(sides: tuple[int, int]) -> None:
    """A pad in front makes the pooling no more lenient."""
    model = model_of(lambda m, x: F.avg_pool2d(F.pad(x, sides * 2), 3, 1, 2))
    for module in (model, compile_graph(model)):
        with pytest.raises(RuntimeError, match="at most half"):
            module(image())


def test_reflected_border_stays_outside() -> None:
    gm = check(model_of(lambda m, x: m.c(F.pad(x, (1, 1, 1, 1), mode="reflect")), c=nn.Conv2d(3, 4, 3)), image())
    assert outside(gm) == {"pad": 1}
