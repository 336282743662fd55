"""Bags between offsets over joined tables against one call per table: the same bits, or left to PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from zendnn_cffi.runtime.offset_bags import OffsetBags

WIDTH = 16
ROWS = (7, 1, 30)


def tables_at(distance: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Tables of ROWS in one allocation of NaN, `distance` elements between one's end and the next one's beginning."""
    memory = torch.full((sum(ROWS) * WIDTH + 3 * distance,), torch.nan, dtype=dtype)
    tables, start = [], 0
    for number, rows in enumerate(ROWS):
        table = memory[start : start + rows * WIDTH].view(rows, WIDTH)
        tables.append(table.copy_(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))))
        start += rows * WIDTH + distance
    return tables


def eager(tables: Any, indices: Any, offsets: Any, mode: str, include_last: bool) -> Any:
    """What PyTorch computes [T, N, D], or the error it raises."""
    try:
        return torch.stack(
            [
                F.embedding_bag(i, t, o, mode=mode, include_last_offset=include_last)
                for t, i, o in zip(tables, indices, offsets, strict=True)
            ]
        )
    except (RuntimeError, ValueError, IndexError) as error:
        return error


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    """Indices and offsets of three tables: evenly spaced, ascending, or anything; some indices out of range."""
    bags, include_last = draw(st.integers(0, 5)), draw(st.booleans())
    kind = draw(st.sampled_from(("even", "ascending", "any")))
    length = draw(st.integers(0, 4))
    indices, offsets = [], []
    for rows in ROWS:
        total = bags * length if kind == "even" else draw(st.integers(0, 9))
        bad = draw(st.sampled_from((None, None, None, -1, rows, 2**40)))
        values = draw(st.lists(st.integers(0, rows - 1), min_size=total, max_size=total))
        if values and bad is not None:
            values[draw(st.integers(0, total - 1))] = bad
        if kind == "even":
            starts = [bag * length for bag in range(bags)]
        else:
            starts = draw(st.lists(st.integers(0, total), min_size=bags, max_size=bags))
            if kind == "ascending":
                starts = [0, *sorted(starts)[1:]] if starts else starts
        ends = [total if kind != "any" else draw(st.integers(0, total + 1))] if include_last else []
        narrow = bad != 2**40 and draw(st.booleans())
        indices.append(torch.tensor(values, dtype=torch.int32 if narrow else torch.int64))
        offsets.append(torch.tensor([*starts, *ends], dtype=draw(st.sampled_from((torch.int32, torch.int64)))))
    return indices, offsets, include_last


@settings(max_examples=300, deadline=None)
@given(call=calls(), mode=st.sampled_from(("sum", "mean")), distance=st.sampled_from((0, 3 * WIDTH, 4)))
def test_the_same_bits_or_left_to_pytorch(call: Any, mode: str, distance: int) -> None:
    indices, offsets, include_last = call
    tables = tables_at(distance)
    bags = OffsetBags(tables, mode, include_last)
    for _ in range(2):  # the second time with what is known of these offsets
        found = bags.joined(indices, offsets)
        if found is not None:
            assert torch.equal(found, eager(tables, indices, offsets, mode, include_last))
    valid = [
        len(o) > include_last
        and o[0] == 0
        and bool((o[1:] >= o[:-1]).all())
        and o[-1] <= len(i)
        and (not include_last or o[-1] == len(i))
        and bool(((i >= 0) & (i < rows)).all())
        for i, o, rows in zip(indices, offsets, ROWS, strict=True)
    ]
    parts = [any(len(indices[m]) for m in part.joined.members) for part in bags.parts]
    assert (found is not None) == (all(valid) and all(parts))


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("distance", (0, 3 * WIDTH, 4))
@pytest.mark.parametrize("whole", (False, True))
def test_dtypes_of_tables(dtype: torch.dtype, distance: int, whole: bool) -> None:
    tables = tables_at(distance, dtype)
    indices = [torch.arange(n) % rows for n, rows in zip((5, 5, 2), ROWS, strict=True)]
    offsets: Any = [torch.tensor(o) for o in ([0, 2, 2], [0, 5, 5], [0, 0, 1])]
    offsets = torch.stack(offsets) if whole else offsets
    found = OffsetBags(tables, "sum", False).joined(indices, offsets)
    assert found is not None and found.dtype == dtype
    assert torch.equal(found, eager(tables, indices, offsets, "sum", False))
    assert torch.equal(OffsetBags(tables, "sum", False).each(indices, offsets), found)


def test_offsets_of_other_lengths_are_left_to_pytorch() -> None:
    indices = [torch.zeros(6, dtype=torch.int64)] * 3
    offsets = [torch.zeros(n, dtype=torch.int64) for n in (2, 3, 4)]  # nine in all: three times three
    assert OffsetBags(tables_at(0), "sum", False).joined(indices, offsets) is None


def test_inputs_stay_as_they_are_and_edited_tables_are_read() -> None:
    tables = tables_at(0)
    bags = OffsetBags(tables, "sum", False)
    indices, offsets = [torch.tensor([0, 0])] * 3, torch.zeros(3, 1, dtype=torch.int64)
    bags.joined(indices, offsets)
    assert not any(index.any() for index in indices) and not offsets.any()
    for table in tables:
        table.fill_(2.0)
    assert torch.equal(bags.joined(indices, offsets), torch.full((3, 1, WIDTH), 4.0))


def test_whether_it_is_worthwhile_and_current() -> None:
    tables = tables_at(0)
    bags = OffsetBags(tables, "sum", False)
    assert bags.is_worthwhile and bags.is_current()
    memory = torch.empty(8 * WIDTH)
    apart = [memory[:WIDTH].view(1, WIDTH), memory[WIDTH + 4 : 2 * WIDTH + 4].view(1, WIDTH)]
    assert not OffsetBags(apart, "sum", False).is_worthwhile
    tables[0].set_(tables[0].clone())
    assert not bags.is_current()
