"""embedding_bag against torch, and every index that must not reach the library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.tolerance import assert_close
from tests.zendnn_cffi.functional.support import dtypes, few, hold, randn
from zendnn_cffi import functional as zf

ROWS = 11


@st.composite
def bags(draw: Any) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 5]), min_size=1, max_size=6))
    indices = draw(st.lists(st.integers(0, ROWS - 1), min_size=sum(sizes), max_size=sum(sizes)))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    kind = draw(st.sampled_from([torch.int32, torch.int64]))
    return torch.tensor(indices, dtype=kind), torch.tensor(starts, dtype=kind)


@few
@given(
    bags(),
    st.sampled_from([1, 3, 16, 17, 48, 64, 130, 300]),
    dtypes,
    st.sampled_from(["sum", "mean", "max"]),
    st.one_of(st.none(), st.integers(-ROWS, ROWS - 1)),
    st.booleans(),
    st.booleans(),
)
def test_embedding_bag(
    bag: Any, width: int, dtype: torch.dtype, kind: str, padding: int | None, last: bool, slices: bool
) -> None:
    indices, offsets = bag
    table = hold(randn(ROWS, width, dtype=dtype) - 3, "slice" if slices else "contiguous")  # negative maxima too
    if last:
        offsets = torch.cat([offsets, torch.tensor([indices.numel()], dtype=offsets.dtype)])
    expected = F.embedding_bag(
        indices, table.double(), offsets, mode=kind, padding_idx=padding, include_last_offset=last
    )
    actual = zf.embedding_bag(table, indices, offsets, kind, padding_idx=padding, include_last_offset=last)
    assert_close(actual, expected, dtype=dtype, k=8)


def test_weights_and_bags_of_equal_size() -> None:
    table, indices, weights = randn(ROWS, 17), torch.randint(0, ROWS, (4, 3)), torch.rand(4, 3)
    expected = F.embedding_bag(indices, table.double(), mode="sum", per_sample_weights=weights.double())
    assert_close(zf.embedding_bag(table, indices, weights=weights), expected, k=3)
    assert_close(
        zf.embedding_bag(table, indices, kind="mean"), F.embedding_bag(indices, table.double(), mode="mean"), k=3
    )


def test_nothing_to_look_up() -> None:
    table, none = randn(ROWS, 5), torch.zeros(0, dtype=torch.int64)
    assert torch.equal(zf.embedding_bag(table, none, torch.zeros(3, dtype=torch.int64), "mean"), torch.zeros(3, 5))
    assert zf.embedding_bag(table, none, none).shape == (0, 5)
    out = torch.full((2, 5), 9.0)
    zf.embedding_bag(table, torch.tensor([3]), torch.tensor([0, 1]), out=out)
    assert torch.equal(out, torch.stack([table[3], torch.zeros(5)]))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"indices": torch.tensor([0, ROWS])}, IndexError, f"from 0 to {ROWS}, the table has rows 0 to {ROWS - 1}"),
        ({"indices": torch.tensor([-1, 2])}, IndexError, "from -1"),
        ({"indices": torch.tensor([2**40, 2])}, IndexError, "rows"),
        ({"indices": torch.tensor([0.0, 1.0])}, TypeError, "indices must be int32 or int64"),
        ({"offsets": torch.tensor([1, 2])}, ValueError, "start at 0"),
        ({"offsets": torch.tensor([0, 2, 1])}, ValueError, "never fall"),
        ({"offsets": torch.tensor([0, 3])}, ValueError, "at most at 2"),
        ({"offsets": None}, ValueError, "need offsets"),
        ({"offsets": torch.tensor([0, 1]), "include_last_offset": True}, ValueError, "last offset must be 2"),
        ({"kind": "median"}, ValueError, "sum, mean, max"),
        ({"kind": "max", "weights": torch.ones(2)}, ValueError, "'sum' only"),
        ({"weights": torch.ones(3)}, ValueError, "shape of indices"),
        ({"padding_idx": ROWS}, ValueError, "padding_idx"),
        ({"table": randn(ROWS)}, ValueError, r"\[E, D\]"),
        ({"table": torch.zeros(0, 5)}, IndexError, "rows"),
        ({"indices": torch.zeros(2, 2, 2, dtype=torch.int64)}, ValueError, "1 or 2 dimensions"),
    ],
)
def test_refusals(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "table": randn(ROWS, 5),
        "indices": torch.tensor([1, 2]),
        "offsets": torch.tensor([0, 1]),
        **change,
    }
    with pytest.raises(error, match=message):
        zf.embedding_bag(**arguments)
