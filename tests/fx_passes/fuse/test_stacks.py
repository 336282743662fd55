"""Stacks between operations of the vocabulary are part of a region."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes import ops
from tests.support.lowering import noise


class Stacking(nn.Module):
    """Two branches side by side, as selective kernels have them."""

    def __init__(self, dim: Any = 1, count: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 8, 3, padding=1) for _ in range(count))
        self.last, self.dim = nn.Conv2d(8, 4, 1), dim

    def forward(self, x: Tensor) -> Tensor:
        together = torch.stack([layer(x).relu() for layer in self.layers], dim=self.dim)
        weights = together.mean((-1, -2), keepdim=True).softmax(self.dim)
        y: Tensor = self.last((together * weights).sum(self.dim))
        return y


def stacks(gm: Any) -> int:
    return sum(node.target in (torch.stack, torch.ops.aten.stack.default) for node in gm.graph.nodes)


@pytest.mark.parametrize("dim", [0, 1, 2, -4])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("entry", ["symbols", "export"])
def test_a_stack_is_inside_the_region(dim: int, count: int, entry: str) -> None:
    torch.manual_seed(0)
    model = Stacking(dim, count).eval()
    example = None if entry == "symbols" else torch.export.export(model, (noise(2, 4, 7, 9),)).module()
    fast: Any = zendnn_cffi.optimize(model if example is None else example, tune="off")
    for x in [noise(2, 4, 7, 9)] + [noise(3, 4, 5, 6)] * (entry == "symbols"):
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(fast.regions()) == 1 and not stacks(fast)
    assert any(node.target is ops.concat for region in fast.regions().values() for node in region.graph.nodes)


def test_by_torch_compile() -> None:
    torch.manual_seed(0)
    model, x = Stacking().eval().requires_grad_(False), noise(2, 4, 7, 9)
    run = torch.compile(model, backend="zendnn", options={"tune": "off"})
    torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(zendnn_cffi.backend.compiled_modules()[-1].regions()) == 1


def of_inputs(m: Any, x: Tensor) -> Any:
    return torch.stack([x, x * 2], 1).flatten(0, 1), m(x)


def that_is_the_result(m: Any, x: Tensor) -> Any:
    return torch.stack([m(x), m(-x)], -1)


def that_is_a_result_too(m: Any, x: Tensor) -> Any:
    together = torch.stack([m(x), m(-x)], 1)
    return together, together.sum(1)


def into_a_tensor(m: Any, x: Tensor) -> Any:
    out = x.new_empty(2, 2, 8, 7, 9)
    torch.stack([m(x), m(-x)], out=out)
    return out.sum(0)


@pytest.mark.parametrize(
    "forward", [of_inputs, that_is_the_result, that_is_a_result_too, into_a_tensor], ids=lambda f: f.__name__
)
def test_others_stay_one_call(forward: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(4, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Any:
            return forward(self.layer, x)

    model = Model().eval()
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    for x in (noise(2, 4, 7, 9), noise(2, 4, 7, 9).contiguous(memory_format=torch.channels_last)):
        with torch.no_grad():
            for found, expected in zip(fast(x), model(x), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
                assert found.stride() == expected.stride()
    assert stacks(fast) == 1


def test_sizes_that_differ_are_refused_as_by_pytorch() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 8, 3), nn.Conv2d(4, 8, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.stack([self.a(x), self.b(y)], 1).sum(1)

    model = Model().eval()
    fast = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        torch.testing.assert_close(
            fast(noise(1, 4, 7, 9), noise(1, 4, 7, 9)), model(noise(1, 4, 7, 9), noise(1, 4, 7, 9))
        )
        for call in (model, fast):
            with pytest.raises(RuntimeError):
                call(noise(1, 4, 7, 9), noise(1, 4, 7, 8))
            with pytest.raises(RuntimeError):  # a concatenation along dimension 1 would take these
                call(noise(1, 4, 7, 9), noise(2, 4, 7, 9))
