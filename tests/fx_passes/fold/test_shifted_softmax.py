"""A softmax of rows less their own maximum: folded where nobody else reads the difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.fold.shifted_softmax import fold_shifted_softmax
from tests.support.graphs import check_twice, count, traced
from tests.support.lowering import net
from tests.tolerance import assert_close

aten = torch.ops.aten
Scores = Callable[[Tensor], Any]


def written_after_the_maximum(x: Tensor) -> Tensor:
    x = x * 1
    largest = x.amax(-1, keepdim=True)
    x.mul_(2).select(0, 0).zero_()
    return F.softmax(x - largest, -1)


def written_before(x: Tensor) -> Tensor:
    x = x * 1
    x.select(0, 0).zero_()
    return F.softmax(x - x.amax(-1, keepdim=True), -1)


def maximum_written(x: Tensor) -> Tensor:
    largest = x.amax(-1, keepdim=True)
    largest.select(0, 0).fill_(1e9)  # all numbers of a row are one, rounded
    return F.softmax(x - largest, -1)


def written_behind(x: Tensor) -> Any:
    x = x * 1
    shares = F.softmax(x - x.amax(-1, keepdim=True), -1)
    x.select(0, 0).zero_()
    return shares, x


FOLDED: dict[str, Scores] = {
    "values": lambda x: F.softmax(x - x.max(dim=-1, keepdim=True).values, dim=-1),
    "first result": lambda x: torch.softmax(x - torch.max(x, -1, True)[0], -1),
    "amax": lambda x: (x - x.amax(-1, keepdim=True)).softmax(-1),
    "one dimension by two names": lambda x: F.softmax(x - x.amax((1,), keepdim=True), -2),
    "aten": lambda x: aten._softmax.default(aten.sub.Tensor(x, aten.max.dim(x, 2, True)[0]), -1, False),
    "maximum read as well": lambda x: (m := x.amax(-1, keepdim=True), F.softmax(x - m, -1)),
    "written before": written_before,
    "written behind": written_behind,
}
STAYS: dict[str, Scores] = {
    "maximum along another dimension": lambda x: F.softmax(x - x.amax(1, keepdim=True), -1),
    "softmax along another dimension": lambda x: F.softmax(x - x.amax(-1, keepdim=True), 1),
    "of all": lambda x: F.softmax(x - x.max(), -1),
    "of two dimensions": lambda x: F.softmax(x - x.amax((1, 2), keepdim=True), -1),
    "without its dimension": lambda x: F.softmax(x - x.max(-1).values, -1),
    "of something else": lambda x: F.softmax(x - (x * 2).amax(-1, keepdim=True), -1),
    "the least": lambda x: F.softmax(x - x.amin(-1, keepdim=True), -1),
    "places": lambda x: F.softmax(x - x.max(-1, keepdim=True).indices, -1),
    "the other way round": lambda x: F.softmax(x.amax(-1, keepdim=True) - x, -1),
    "added": lambda x: F.softmax(x + x.amax(-1, keepdim=True), -1),
    "difference read as well": lambda x: (y := x - x.amax(-1, keepdim=True), F.softmax(y, -1)),
    "logarithm": lambda x: F.log_softmax(x - x.amax(-1, keepdim=True), -1),
    "written after the maximum": written_after_the_maximum,
    "maximum written": maximum_written,
}  # fmt: skip


def is_folded(scores: Scores, dtype: torch.dtype) -> bool:
    x = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    gm = fold_shifted_softmax(traced(net(lambda m, x: scores(x)), x))
    check_twice(gm, fold_shifted_softmax)
    torch.testing.assert_close(gm(x), scores(x))
    found = [node for node in gm.graph.nodes if node.target is ops.binary and node.args[2] in ("sub", "add")]
    return not found and count(gm)["softmax"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", FOLDED)
def test_folded(case: str, dtype: torch.dtype) -> None:
    assert is_folded(FOLDED[case], dtype)


@pytest.mark.parametrize("case", STAYS)
def test_stays(case: str) -> None:
    assert not is_folded(STAYS[case], torch.float32)


def test_a_single_number_has_dimensions_0_and_minus_1() -> None:
    x = torch.tensor(2.5)
    gm = fold_shifted_softmax(traced(net(lambda m, x: F.softmax(x - x.amax(0, keepdim=True), -1)), x))
    assert gm(x).shape == () and float(gm(x)) == 1.0


def rows() -> Tensor:
    """Rows [7, 5] of numbers, some of them none."""
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    inf = torch.inf
    x[1, 2], x[2, 1], x[3], x[4], x[5, 0], x[6] = inf, -inf, -inf, inf, torch.nan, torch.tensor([3e38, -3e38, 0, 0, 1])
    return x


@pytest.mark.parametrize("case", ["values", "amax"])
def test_rows_with_an_infinity_are_as_before(case: str) -> None:
    gm = fold_shifted_softmax(traced(net(lambda m, x: FOLDED[case](x)), rows()))
    torch.testing.assert_close(gm(rows()), FOLDED[case](rows()), equal_nan=True)


class Sinks(nn.Module):
    """Attention as gpt-oss writes it: a learned score that takes a share of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.sinks = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).view(x.shape[0], x.shape[1], 2, 16).transpose(1, 2) for m in (self.q, self.k, self.v))
        scores = q @ k.transpose(2, 3) / 4
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[1], -1)
        scores = torch.cat((scores, sinks), -1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
        shares = F.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1]
        return self.out((shares @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("by_compile", [False, True])
def test_attention_with_sinks_is_one_region(by_compile: bool) -> None:
    torch.manual_seed(0)
    model, x = Sinks().eval(), torch.randn(2, 9, 32)
    if by_compile:
        fast: Any = torch.compile(model, backend="zendnn", options={"tune": "off"})
    else:
        fast = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        assert_close(fast(x), model(x), k=32)
    gm = zendnn_cffi.backend.compiled_modules()[-1] if by_compile else fast
    assert len(gm.regions()) == 1 and count(gm)["max"] == 0
