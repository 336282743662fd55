"""Results that share memory in eager share it here, too, and nothing else leaves a region for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zendnn_cffi
from fx_passes.pipeline import compile_graph
from tests.support.graphs import check, check_equal, count, image, model_of, outside
from tests.support.lowering import noise
from tests.tolerance import assert_close

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "flatten": lambda y: y.flatten(1),
    "permute": lambda y: y.permute(0, 2, 3, 1),
    "view of a view": lambda y: y.flatten(2).transpose(1, 2),
    "its own batch": lambda y: y.view(y.size(0), -1),
    "the batch of another view": lambda y: y.view(y.flatten(2).size(0), 2, -1),
    "rows": lambda y: y[1:],
    "every other column": lambda y: y[..., ::2],
    "pieces": lambda y: y.chunk(2, 1),
    "a piece": lambda y: y.chunk(2, 1)[1],
    "squeezed": lambda y: y.unsqueeze(1).squeeze(1),
    "a view that is no vocabulary": lambda y: torch.narrow(y.flatten(1), 1, 2, 5),
    "transposed by attribute": lambda y: y.flatten(1).T,
    "a diagonal": lambda y: y.diagonal(0, 2, 3),
    "two views": lambda y: (y.flatten(1), y.flatten(1)[:, 3:]),
}


def written_everywhere(results: Any) -> list[Tensor]:
    """The results after each of them was written to, one after another."""
    tensors = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
    for number, tensor in enumerate(tensors):
        tensor.add_(number + 1.0)
    return tensors


def model_with(view: Callable[[Tensor], Any]) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Any:
        y = F.relu(m.c(x))
        return y, view(y)

    return model_of(forward, c=nn.Conv2d(3, 4, 1))


@pytest.mark.parametrize("name", VIEWS)
def test_who_writes_to_a_result_finds_it_in_views_of_it(name: str) -> None:
    model, x = model_with(VIEWS[name]).float(), noise(2, 3, 5, 7)
    fast = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        for _ in range(2):
            for ours, theirs in zip(written_everywhere(fast(x)), written_everywhere(model(x)), strict=True):
                assert_close(ours, theirs, k=3)


@pytest.mark.parametrize("name", VIEWS)
def test_one_result_leaves_the_region(name: str) -> None:
    gm = check(model_with(VIEWS[name]), image())
    (region,) = gm.regions().values()
    (output,) = region.graph.find_nodes(op="output")
    assert count(gm)["convolution"] == 1 and len(output.all_input_nodes) == 1


def test_through_torch_compile() -> None:
    model, x = model_with(VIEWS["view of a view"]).float(), noise(2, 3, 5, 7)
    fast = torch.compile(model, backend="zendnn")
    with torch.no_grad():
        for ours, theirs in zip(written_everywhere(fast(x)), written_everywhere(model(x)), strict=True):
            assert_close(ours, theirs, k=3)


def test_views_of_views_that_are_results() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.c(x).flatten(2)
        return y.transpose(1, 2), y

    model = model_of(forward, c=nn.Conv2d(3, 4, 1)).float()
    fast = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        first, second = fast(noise(2, 3, 5, 7))
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_a_view_that_the_region_reads_is_there_twice() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.c(x)
        flat = y.flatten(2)
        return y, flat, m.l(flat)

    gm = check(model_of(forward, c=nn.Conv2d(3, 4, 1), l=nn.Linear(63, 2)), image())
    assert count(gm)["flatten"] == 2 and outside(gm)["flatten"] == 1 and len(gm.regions()) == 1


def test_views_of_what_is_no_result_stay_inside() -> None:
    gm = check(model_of(lambda m, x: m.c(x).permute(0, 2, 3, 1).flatten(1), c=nn.Conv2d(3, 4, 1)), image())
    assert count(gm)["flatten"] == count(gm)["permute"] == 1 and not outside(gm)


def test_views_that_plain_pytorch_reads_stay_inside() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.c(x)
        return torch.cumsum(y, 0), torch.cumsum(y.flatten(1), 0)

    gm = check(model_of(forward, c=nn.Conv2d(3, 4, 1)), image())
    assert count(gm)["flatten"] == 1 and outside(gm) == {"cumsum": 2}


def test_a_size_that_is_told_inside_alone_keeps_its_view_inside() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y, wide = m.c(x), m.d(x)
        return y, y.reshape(wide.size(2), -1), wide.sum()

    gm = check(model_of(forward, c=nn.Conv2d(3, 4, 1), d=nn.Conv2d(3, 8, 1)), image())
    assert not outside(gm).get("reshape") and len(gm.regions()) == 1


def test_sizes_that_are_free() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.c(x)
        return y, y.flatten(2).transpose(1, 2), y.reshape(y.shape[0], -1)

    model = model_of(forward, c=nn.Conv2d(3, 4, 3))
    gm = compile_graph(model, (image(),))
    for shape in ((2, 3, 9, 7), (5, 3, 9, 7)):
        check_equal(model, gm, image(*shape))


@pytest.mark.needs("avx512")
def test_several_results_of_a_layer_are_no_views_of_each_other() -> None:
    model = nn.LSTM(24, 16, 2).eval()
    inputs = (noise(7, 3, 24), (noise(2, 3, 16), noise(2, 3, 16)))
    fast = zendnn_cffi.optimize(model, inputs, tune="off")
    check_equal(model, fast, *inputs)
    (region,) = fast.regions().values()
    assert all(lowered is not None for lowered in region.lowered.values()) and region.lowered
