"""Pads, sizes, identities, per-channel constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes.fold.channel_scale import fold_channel_scale
from fx_passes.fold.identities import fold_identities
from fx_passes.fold.pad import fold_pad
from fx_passes.fold.shapes import fold_shapes
from fx_passes.pipeline import compile_graph
from tests.support.graphs import after, check, check_equal, check_twice, count, image, model_of, name_of, outside

PADS: dict[str, tuple[Callable[..., Any], int]] = {
    "into a convolution": (lambda m, x: m.c(F.pad(x, (1, 2, 0, 3))), 0),
    "one dimension only": (lambda m, x: m.c(F.pad(x, (1, 2))), 0),
    "a module": (lambda m, x: m.c(m.z(x)), 0),
    "average that counts padding": (lambda m, x: F.avg_pool2d(F.pad(x, (1, 0, 1, 0)), 3, 2), 0),
    "its own padding too": (lambda m, x: F.avg_pool2d(F.pad(x, (1, 0, 1, 0)), 3, 2, 1), 0),
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


def test_reflected_border_stays_outside() -> None:
    gm = check(model_of(lambda m, x: m.c(F.pad(x, (1, 1, 1, 1), mode="reflect")), c=nn.Conv2d(3, 4, 3)), image())
    assert outside(gm) == {"pad": 1}


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


def test_copies_that_only_order_memory_disappear() -> None:
    model = model_of(lambda m, x: m.l(x.transpose(1, 3).contiguous().reshape(2, -1).relu()), l=nn.Linear(189, 2))
    assert count(check(model, image(2, 3, 9, 7)))["contiguous"] == 0
    check_twice(after("fold_identities", model), fold_identities)


def test_copies_whose_strides_can_be_seen_stay() -> None:
    model = model_of(lambda m, x: m.c(x).transpose(1, 3).contiguous(), c=nn.Conv2d(3, 4, 1))
    gm = check(model, image())
    assert gm(image()).is_contiguous()


def test_repeated_activations() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        return x.relu().relu(), F.relu6(x).relu(), F.relu6(x).clamp(-1, 7), F.relu6(x).clamp(1, 7)

    assert count(check(model_of(forward), image()))["eltwise"] == 5


def test_relu_of_absolute_values_is_no_operation() -> None:
    """lp_pool has it: the library's relu would make 0 of a NaN."""
    model = model_of(lambda m, x: F.leaky_relu(x, 0.5).abs().relu())
    assert count(check(model, image()))["eltwise"] == 2


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


def test_operations_that_change_nothing() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = torch.cat((m.l(x) * 1.0,), 1)
        return m.l(y / 1 + 0.0), torch.cat((x,), 1)

    model = model_of(forward, l=nn.Linear(7, 7))
    gm = compile_graph(Wide(model), (image(2, 7),))  # exported, so that dtypes are known
    assert count(gm)["concat"] == 1  # what is returned has to be a copy
    assert not count(gm)["binary"]
    check_equal(Wide(model), gm, image(3, 7))


class Wide(nn.Module):
    """A model that torch.fx cannot trace, around another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) if x.shape[0] < 100 else x


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
