"""Values that a whole one is replaced by, in place: `scores[:, :, 0:] = scores[:, :, 0:] + bias`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from fx_passes import ops
from tests.support.graphs import check, image, model_of

Forward = Callable[[Any, Tensor], Any]


def scores_of(m: Any, x: Tensor) -> Tensor:
    """[B, L, L], computed by a product, with three dimensions for certain."""
    rows = m.first(x).reshape(2, -1, 8)
    return rows @ m.second(x).reshape(2, -1, 8).transpose(1, 2)


def _sum(m: Any, x: Tensor) -> Any:
    scores = scores_of(m, x)
    scores[:, 0:] = scores[:, 0:] + scores.sum(-1, keepdim=True)
    return scores.softmax(-1)


def _other_shape(m: Any, x: Tensor) -> Any:
    """As MViT adds relative positions."""
    scores = scores_of(m, x)
    rows, columns = scores.shape[1], scores.shape[2]
    scores[:, :, 0:] = (scores[:, :, 0:].view(2, rows, 1, columns) * 2).view(2, rows, columns)
    return scores.softmax(-1)


def _ellipsis(m: Any, x: Tensor) -> Any:
    scores = scores_of(m, x)
    scores[...] = scores.tanh()
    return scores + 1


def _broadcast(m: Any, x: Tensor) -> Any:
    scores = scores_of(m, x)
    scores[:] = scores.sum(-1, keepdim=True)
    return scores.softmax(-1), scores.sum(1)


def _fewer_dimensions(m: Any, x: Tensor) -> Any:
    scores = scores_of(m, x)
    scores[:] = scores.sum(-1).reshape(2, -1)[1] * 2
    return scores.softmax(-1)


def _transposed(m: Any, x: Tensor) -> Any:
    scores = scores_of(m, x)
    scores[:] = (scores + 1).transpose(1, 2)
    return scores.view(-1), scores.exp()


def _old_value_read_before(m: Any, x: Tensor) -> Any:
    scores = scores_of(m, x)
    before = scores * 2
    scores[:] = scores + 1
    return before + scores


@pytest.mark.parametrize(
    "forward", [_sum, _other_shape, _ellipsis, _broadcast, _fewer_dimensions, _transposed, _old_value_read_before]
)
def test_becomes_the_new_value(forward: Forward) -> None:
    gm = check(model_of(forward, first=nn.Linear(4, 8), second=nn.Linear(4, 8)), image(2, 5, 4))
    assert not _writes(gm), gm.code
    assert len(gm.regions()) == 1, gm.code


def _part(m: Any, x: Tensor) -> Any:
    scores = scores_of(m, x)
    scores[:, 1:] = scores[:, 1:] + 1
    return scores.softmax(-1)


def _every_second(m: Any, x: Tensor) -> Any:
    scores = scores_of(m, x)
    scores[:, ::2] = scores[:, ::2] + 1
    return scores.softmax(-1)


def _up_to_the_last(m: Any, x: Tensor) -> Any:
    scores = scores_of(m, x)
    scores[:, :-1] = scores[:, :-1] + 1
    return scores.softmax(-1)


def _another_dtype(m: Any, x: Tensor) -> Any:
    scores = scores_of(m, x)
    scores[:] = (scores + 1 / 3).float()
    return scores.softmax(-1)


def _new_value_read_later(m: Any, x: Tensor) -> Any:
    scores = scores_of(m, x)
    new = scores + 1
    scores[:] = new
    return scores, new


def _new_value_written_later(m: Any, x: Tensor) -> Any:
    scores = scores_of(m, x)
    new = scores + 1
    scores[:] = new
    new += 1
    return scores.softmax(-1)


def _written_again(m: Any, x: Tensor) -> Any:
    scores = scores_of(m, x)
    new = scores + 1
    rows = new[0]
    scores[:] = new
    scores[:, 1:] = 0
    return scores, rows


def _view_of_the_old_value(m: Any, x: Tensor) -> Any:
    scores = scores_of(m, x)
    rows = scores[0]
    scores[:] = scores + 1
    return rows * 2


def _of_an_input(m: Any, x: Tensor) -> Any:
    x[:] = m.third(x)
    return x * 2


def _an_input(m: Any, x: Tensor) -> Any:
    scores = m.third(x)
    scores[:] = x
    return scores + 1


def _leading_one(m: Any, x: Tensor) -> Any:
    """PyTorch takes leading dimensions of size 1 out of what is written."""
    scores = scores_of(m, x)
    scores[:] = (scores + 1).reshape(1, 2, 5, 5)
    return scores.softmax(-1)


def _channels_last(m: Any, x: Tensor) -> Any:
    """The result of a transposition keeps its strides, which element-wise operations hand on."""
    turned = m.third(x).transpose(1, 2)
    turned[:] = turned.contiguous() + 1
    return turned * 2


@pytest.mark.parametrize(
    "forward",
    [
        _part,
        _every_second,
        _up_to_the_last,
        _another_dtype,
        _new_value_read_later,
        _new_value_written_later,
        _written_again,
        _view_of_the_old_value,
        _of_an_input,
        _an_input,
        _leading_one,
        _channels_last,
    ],
)
def test_stays_a_write(forward: Forward) -> None:
    children = {"first": nn.Linear(4, 8), "second": nn.Linear(4, 8), "third": nn.Linear(4, 4)}
    gm = check(model_of(forward, **children), image(2, 5, 4))
    assert _writes(gm), gm.code


def _writes(gm: Any) -> list[Any]:
    return [node for node in gm.graph.nodes if node.target is operator.setitem or node.target in ops.WRITING]


def _one_after_the_other(m: Any, x: Tensor) -> Any:
    scores = scores_of(m, x)
    scores[:] = scores + 1
    others = scores_of(m, x * 2)
    others[:] = scores
    return others.softmax(-1)


def _a_write_before(m: Any, x: Tensor) -> Any:
    scores = scores_of(m, x)
    scores *= 2
    scores[:] = scores.tanh()
    return scores.softmax(-1)


def _a_write_behind(m: Any, x: Tensor) -> Any:
    scores = scores_of(m, x)
    scores[:] = scores.tanh()
    scores *= 2
    return scores.softmax(-1)


def _a_view_written_behind(m: Any, x: Tensor) -> Any:
    scores = scores_of(m, x)
    scores[:] = scores.tanh()
    rows = scores.transpose(1, 2)
    others = scores_of(m, x * 2)
    others += rows
    rows += 1
    return scores + others


@pytest.mark.parametrize("forward", [_one_after_the_other, _a_write_before, _a_write_behind, _a_view_written_behind])
def test_several_writes(forward: Forward) -> None:
    gm = check(model_of(forward, first=nn.Linear(4, 8), second=nn.Linear(4, 8)), image(2, 5, 4))
    assert gm.regions(), gm.code
