"""Bags of rows from many embedding tables in one call.

A model with 26 tables asks for 26 small sums, and what each call costs besides adding rows is most of its time. Tables
of one row length are parts of one large table that begins at the lowest of their addresses, if their distances are
whole rows:

    table 0  [ rows ]         table 1 [ rows ]            table 2 [ rows ]
    joined   [ 0 ... | never read ... | first[1] ... | never read ... | first[2] ... ]

Tables of several row lengths, as those of a tabular model, become one joined table for each length.

No row is copied. Memory between the tables may belong to anybody, or to nobody: so every index is checked first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from zendnn_cffi.primitives import allocation
from zendnn_cffi.runtime import huge_pages
from zendnn_cffi.values import dataclass

INDEX_DTYPES = (torch.int32, torch.int64)
MODES = {"sum": 0, "mean": 1}  # those whose kernel only reads the rows asked for; aten's numbers


@dataclass(frozen=True)
class Joined:
    """Tables whose rows are rows of one.

    table    [E, D], from the lowest row of all to the highest
    members  numbers of the tables in it
    first    the row of `table` that each member's row 0 is
    """

    table: Tensor
    members: tuple[int, ...]
    first: tuple[int, ...]


def join_tables(tables: Sequence[Tensor]) -> list[Joined]:
    """Return the tables [E_t, D], contiguous and of one dtype, as few joined ones; those live no longer than `tables`.

    Tables whose distance is no whole number of rows are not joined with each other.
    Raises  ValueError for tables of several row lengths or dtypes, or not contiguous.
    """
    width, dtype = tables[0].shape[1], tables[0].dtype
    if any(t.ndim != 2 or t.shape[1] != width or t.dtype != dtype or not t.is_contiguous() for t in tables):
        raise ValueError("tables must be contiguous [E, D], of one row length and dtype")
    row_bytes = width * dtype.itemsize
    groups: dict[int, list[int]] = {}
    for number, table in enumerate(tables):
        groups.setdefault(table.data_ptr() % row_bytes, []).append(number)
    joined = []
    for members in groups.values():
        starts = [tables[m].data_ptr() for m in members]
        base = min(starts)
        end = max(start + tables[m].numel() * dtype.itemsize for start, m in zip(starts, members, strict=True))
        table = tables[members[0]] if len(members) == 1 else _at(base, end - base, dtype).view(-1, width)
        joined.append(Joined(table, tuple(members), tuple((start - base) // row_bytes for start in starts)))
    return joined


def _at(address: int, size_bytes: int, dtype: torch.dtype) -> Tensor:
    """The memory from `address` on as a flat tensor, which does not keep it alive."""
    with torch.inference_mode(False):
        return torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=dtype)


@dataclass(frozen=True)
class _Part:
    """One call: a joined table, and what it takes of the indices and gives to the result.

    columns  of the indices [N, K]; None for all
    offsets  [N * members], where each bag starts
    first    [K of these columns], what is added to indices; None for nothing
    places   (bags of this part, bags of the result) in runs
    """

    table: Tensor
    columns: slice | Tensor | None
    offsets: Tensor
    first: Tensor | None
    places: tuple[tuple[slice, slice], ...]


class _Tables:
    """Tables that are kept alive, and which indices are rows of theirs; lengths: indices of each table."""

    def __init__(self, tables: Sequence[Tensor], lengths: Sequence[int]) -> None:
        self.tables = tuple(tables)
        rows = [table.shape[0] for table in tables]
        self.fewest = min(rows)
        self.limits = torch.repeat_interleave(whole(rows), whole(lengths))
        huge_pages.advise(tables)

    def in_range(self, indices: Tensor) -> bool:
        """Whether every index [N, K] is a row of its table."""
        lowest, highest = torch.aminmax(indices)
        if lowest.item() < 0:
            return False
        return highest.item() < self.fewest or bool((indices.amax(0) < self.limits).all())


class BagGroup(_Tables):
    """Bags of fixed lengths from several tables [E_t, D], a row of bags per sample.

    tables   kept alive
    lengths  indices per bag, for each table
    batch    samples per call
    mode     "sum" or "mean"
    """

    def __init__(self, tables: Sequence[Tensor], lengths: Sequence[int], batch: int, mode: str) -> None:
        super().__init__(tables, lengths)
        self.mode = MODES[mode]
        self.parts = [_part(joined, lengths, batch) for joined in join_tables(tables)]

    def run_into(self, indices: Tensor, out: Tensor) -> None:
        """Write the bags to out [N, tables, D]; indices [N, K], those of table 0's bag first, must be in range."""
        batch, _, width = out.shape
        for part in self.parts:
            taken = indices if part.columns is None else _columns(indices, part.columns)
            rows = (taken.to(torch.int64) if part.first is None else taken + part.first).reshape(-1)
            bags = torch.embedding_bag(part.table, rows, part.offsets, False, self.mode)[0].view(batch, -1, width)
            for here, there in part.places:
                out[:, there].copy_(bags[:, here])


class RowGroup(_Tables):
    """A row of each of several tables [E_t, D_t], side by side; tables of one row length are joined.

    tables  kept alive; of one dtype
    """

    def __init__(self, tables: Sequence[Tensor]) -> None:
        super().__init__(tables, [1] * len(tables))
        self.parts: list[tuple[Tensor, slice]] = []  # joined tables, and which of the indices in their order they take
        order: list[int] = []
        first: list[int] = []
        for members in by_row_length(tables):
            for joined in join_tables([tables[member] for member in members]):
                begin = len(order)
                order += [members[number] for number in joined.members]
                first += joined.first
                self.parts.append((joined.table, slice(begin, len(order))))
        self.order, self.first = whole(order), whole(first).unsqueeze(1)
        self.places = [order.index(number) for number in range(len(tables))]

    def run_into(
        self, indices: Tensor, out: Tensor, before: Sequence[Tensor] = (), after: Sequence[Tensor] = ()
    ) -> None:
        """Write before, the rows, then after to out [N, *]; indices [N, tables] must be in range."""
        ordered = indices.t().index_select(0, self.order) + self.first  # so that what is concatenated is contiguous
        rows = [row for table, part in self.parts for row in torch.embedding(table, ordered[part]).unbind(0)]
        torch.cat([*before, *(rows[place] for place in self.places), *after], 1, out=out)


def by_row_length(tables: Sequence[Tensor]) -> list[list[int]]:
    """Numbers of the tables [E_t, D_t] that have one row length, in order of the first of each."""
    groups: dict[int, list[int]] = {}
    for number, table in enumerate(tables):
        groups.setdefault(table.shape[1], []).append(number)
    return list(groups.values())


def _part(joined: Joined, lengths: Sequence[int], batch: int) -> _Part:
    """What to call for one joined table."""
    own = whole([lengths[m] for m in joined.members])
    starts = torch.cat([whole([0]), whole(lengths).cumsum(0)])
    columns: slice | Tensor | None = torch.cat(
        [torch.arange(int(starts[m]), int(starts[m + 1]), device="cpu") for m in joined.members]
    )
    begins = own.cumsum(0) - own
    offsets = (torch.arange(batch, device="cpu").unsqueeze(1) * int(own.sum()) + begins).view(-1)
    first = torch.repeat_interleave(whole(joined.first), own) if len(own) > 1 else None
    places = _runs(joined.members)
    if len(places) == 1:
        begin, end = int(starts[joined.members[0]]), int(starts[joined.members[-1] + 1])
        columns = None if (begin, end) == (0, sum(lengths)) else slice(begin, end)
    return _Part(joined.table, columns, offsets, first, places)


def _columns(indices: Tensor, columns: slice | Tensor) -> Tensor:
    return indices[:, columns] if isinstance(columns, slice) else indices.index_select(1, columns)


def whole(numbers: Sequence[int]) -> Tensor:
    """Numbers as PyTorch's kernels for bags take them."""
    return allocation.numbers(numbers, torch.int64)


def _runs(members: Sequence[int]) -> tuple[tuple[slice, slice], ...]:
    """Neighbouring members as pairs of slices: of the members, and of all tables."""
    runs: list[tuple[slice, slice]] = []
    for here, there in enumerate(members):
        if runs and runs[-1][1].stop == there:
            runs[-1] = slice(runs[-1][0].start, here + 1), slice(runs[-1][1].start, there + 1)
        else:
            runs.append((slice(here, here + 1), slice(there, there + 1)))
    return tuple(runs)
