"""Lengths that torch.export asserts to be sizes: one image of a batch that is cut by lengths is not cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.fold.asserted_sizes import fold_asserted_sizes
from tests.support.graphs import after, check_twice, model_of, outside

SPLIT = torch.ops.aten.split_with_sizes.default


def cut_by_lengths(m: Any, x: Tensor, offsets: Tensor) -> Tensor:
    """x [N, 16], offsets [images + 1]; attends within each image; returns [N, 16]."""
    heads = m.a(x).unflatten(1, (2, 8)).transpose(0, 1).unsqueeze(0)
    pieces = torch.split(heads, (offsets[1:] - offsets[:-1]).tolist(), dim=2)
    found = [F.scaled_dot_product_attention(y, y, y) for y in pieces]
    y: Tensor = m.b(torch.cat(found, 2).squeeze(0).transpose(0, 1).flatten(1))
    return y


def encoder(forward: Callable[..., Any] = cut_by_lengths) -> nn.Module:
    torch.manual_seed(0)
    return model_of(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16)).float().eval()


def test_one_image_is_not_cut() -> None:
    model, x = encoder(), torch.randn(12, 16)
    fast = zendnn_cffi.optimize(model, (x, torch.tensor([0, 12])), tune="off")
    assert "split_with_sizes" not in outside(fast) and len(fast.regions()) == 1
    for rows in (12, 7, 1, 30):
        x, offsets = torch.randn(rows, 16), torch.tensor([0, rows])
        torch.testing.assert_close(fast(x, offsets), model(x, offsets))


def test_a_length_that_is_another_raises_as_in_eager() -> None:
    model, x = encoder(), torch.randn(12, 16)
    fast = zendnn_cffi.optimize(model, (x, torch.tensor([0, 12])), tune="off")
    assert len(fast.regions()) == 1
    for end in (11, 13, -12):
        with pytest.raises(RuntimeError, match="split_with_sizes"):
            model(x, torch.tensor([0, end]))
        with pytest.raises(RuntimeError, match="split_with_sizes"):
            fast(x, torch.tensor([0, end]))


def _doubled(m: Any, x: Tensor, offsets: Tensor) -> Tensor:
    pieces = torch.split(m.a(x), (offsets[1:] - offsets[:-1]).tolist())
    y: Tensor = m.b(torch.cat([piece * 2 for piece in pieces]))
    return y


@pytest.mark.parametrize("forward", (cut_by_lengths, _doubled))
def test_several_images_are_cut(forward: Callable[..., Any]) -> None:
    model = encoder(forward)
    fast = zendnn_cffi.optimize(model, (torch.randn(12, 16), torch.tensor([0, 5, 12])), tune="off")
    for offsets in ([0, 5, 12], [0, 11, 12], [0, 12], [0, 3, 8, 12]):
        x, ends = torch.randn(12, 16), torch.tensor(offsets)
        torch.testing.assert_close(fast(x, ends), model(x, ends))


def _written(m: Any, x: Tensor, offsets: Tensor) -> Tensor:
    y = m.a(x).relu()
    (piece,) = torch.split(y, (offsets[1:] - offsets[:-1]).tolist())
    z = piece * 2
    y.mul_(3.0)
    result: Tensor = m.b(piece + z + y)
    return result


def _returned(m: Any, x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    y = m.a(x)
    (piece,) = torch.split(y, (offsets[1:] - offsets[:-1]).tolist())
    return m.b(y), piece


def _given(m: Any, x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    (piece,) = torch.split(x, (offsets[1:] - offsets[:-1]).tolist())
    return m.b(m.a(piece)), piece


def _as_a_number(m: Any, x: Tensor, offsets: Tensor) -> Tensor:
    (length,) = (offsets[1:] - offsets[:-1]).tolist()
    (piece,) = torch.split(m.a(x), [length])
    y: Tensor = m.b(piece) * length
    return y


@torch.no_grad()  # eager refuses the write to what was cut otherwise
@pytest.mark.parametrize("forward", (_written, _returned, _given, _as_a_number))
def test_whoever_else_reads_the_value(forward: Callable[..., Any]) -> None:
    model = encoder(forward)
    fast = zendnn_cffi.optimize(model, (torch.randn(12, 16), torch.tensor([0, 12])), tune="off")
    assert fast.regions()
    for rows in (12, 5):
        x, offsets = torch.randn(rows, 16), torch.tensor([0, rows])
        found, expected = fast(x.clone(), offsets), model(x.clone(), offsets)
        torch.testing.assert_close(found, expected)
        if isinstance(found, tuple):
            found[1].add_(1.0)
            torch.testing.assert_close(found[0], expected[0])


def test_the_graphs_themselves() -> None:
    x = torch.randn(12, 16)
    one = after("fold_asserted_sizes", encoder(), (x, torch.tensor([0, 12])))
    assert not one.graph.find_nodes(op="call_function", target=SPLIT)
    assert one.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)
    check_twice(one, fold_asserted_sizes)
    two = after("fold_asserted_sizes", encoder(_doubled), (x, torch.tensor([0, 5, 12])))
    assert len(two.graph.find_nodes(op="call_function", target=SPLIT)) == 1
