"""max() and min() of sizes are recorded by symbolic tracing: networks that pad like TensorFlow."""

from __future__ import annotations

import builtins
import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.trace.extremes import extremes_recorded
from fx_passes.trace.trace import trace


class Same(nn.Conv2d):
    """A convolution that pads as TensorFlow's "SAME"."""

    def forward(self, input: Tensor) -> Tensor:
        padding: list[int] = []
        height, width = input.shape[-2:]
        for size, window, stride in zip((width, height), self.kernel_size[::-1], self.stride[::-1], strict=True):
            total = max((math.ceil(size / stride) - 1) * stride + window - size, 0)
            padding += [total // 2, total - total // 2]
        return super().forward(nn.functional.pad(input, padding))


class Limited(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, : min(x.shape[1] - 1, 3)] * max(x.shape[0], 2, math.floor(x.shape[1] / 2))


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Same(3, 8, 3, 2), nn.ReLU(), Same(8, 8, (5, 3), (2, 1)), Same(8, 4, 2, 3)).eval()


def test_paddings_that_follow_from_sizes_are_traced_symbolically(network: nn.Module) -> None:
    traced = trace(network, (torch.randn(1, 3, 17, 16),))
    assert traced.guards is None and not traced.leaves
    assert {max, math.ceil} <= {node.target for node in traced.graph.nodes}  # type: ignore[union-attr]


@pytest.mark.parametrize("sizes", [(1, 17, 16), (2, 16, 33), (3, 30, 31)])
def test_one_region_computes_them_for_any_size(network: nn.Module, sizes: tuple[int, int, int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a size that two others read was erased twice
        fast = zendnn_cffi.optimize(network, tune="off")
    x = torch.randn(sizes[0], 3, *sizes[1:])
    torch.testing.assert_close(fast(x), network(x))
    assert [len(region.lowered) for region in fast.regions().values()] == [1]


@pytest.mark.parametrize("sizes", [(1, 5), (4, 3), (2, 12)])
def test_minimum_floor_and_three_arguments(sizes: tuple[int, int]) -> None:
    fast, x = zendnn_cffi.optimize(Limited().eval()), torch.randn(sizes)
    assert not fast.leaves
    torch.testing.assert_close(fast(x), Limited()(x))


def test_python_has_its_own_functions_back() -> None:
    before = builtins.max, builtins.min
    with pytest.raises(KeyError), extremes_recorded():
        assert (max(1, 2), max([3, 1]), min(4, 5, key=lambda v: -v), max([], default=7)) == (2, 3, 5, 7)
        raise KeyError
    assert (builtins.max, builtins.min) == before
