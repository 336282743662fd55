"""Tensors that have the order asked for in one call, and are copied in another: as in eager, whatever the example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi


class Ordering(nn.Module):
    """torch.export alone follows it: forward asks for a size."""

    def __init__(self, order: Callable[[Tensor], Tensor], use: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.order, self.use = nn.Conv2d(3, 4, 1), order, use

    def forward(self, x: Tensor) -> Any:
        if x.shape[0] > 100:
            raise ValueError("too many")
        return self.use(self.layer, x, self.order(x))


def written(layer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    y.add_(1)
    return layer(x), y


def written_later(layer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    x.mul_(2)
    return layer(y), y


def returned(layer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return layer(x), y, F.silu(y)


def of_an_intermediate(layer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    again = y.contiguous()
    again.sub_(1)
    return layer(y), again


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.mT.contiguous().mT,
}
CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Any, Tensor, Tensor], Any], str]] = {
    "written": (lambda x: x.contiguous(), written, "rows"),
    "written, and a copy of the example": (lambda x: x.contiguous(), written, "transposed"),
    "written later": (lambda x: x.contiguous(), written_later, "rows"),
    "returned": (lambda x: x.contiguous(), returned, "rows"),
    "of an intermediate": (lambda x: x * 2, of_an_intermediate, "rows"),
    "channels last": (lambda x: x.contiguous(memory_format=torch.channels_last), written, "channels last"),
    "converted": (lambda x: x.to(x.dtype, memory_format=torch.channels_last), written, "channels last"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_graph_is_for_tensors_in_any_order(case: str) -> None:
    order, use, example = CASES[case]
    model = Ordering(order, use).eval()
    values = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    fast = zendnn_cffi.optimize(model, (LAYOUTS[example](values.clone()),), tune="off")
    for layout in LAYOUTS.values():
        x, same = layout(values.clone()), layout(values.clone())
        with torch.no_grad():
            results, expected = fast(x), model(same)
        torch.testing.assert_close((x, *results), (same, *expected))
        assert [result is x for result in results] == [result is same for result in expected]
        assert [result.stride() for result in results[1:]] == [result.stride() for result in expected[1:]]
    assert not fast.call_kinds.modules  # one graph for all
