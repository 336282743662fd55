"""Bags between offsets from many embedding tables in one call.

A recommender asks each of its tables for bags of any lengths: a flat tensor of indices, and the offsets at which bags
begin. The tables become one (zendnn_cffi.runtime.joined_tables), and so do indices and offsets:

    table 0  indices [i i i i i], offsets [0 3]       joined  indices [i i i i i, j+r j+r j+r], r the row where table 1
    table 1  indices [j j j], offsets [0 0]                   offsets [0 3 5 5]                 begins in the joined one

The kernel adds the same rows in the same order as in a call per table, so the sums are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zendnn_cffi.runtime import huge_pages
from zendnn_cffi.runtime.joined_tables import MODES, Joined, join_tables, whole
from zendnn_cffi.values import dataclass

MOST_PARTS = 8  # joined tables; of more, each would be few tables, and their calls as many
_address = torch.Tensor.data_ptr


@dataclass(frozen=True)
class _Part:
    """One joined table.

    first    [members, 1], the row where each member begins in it; None for a table by itself
    limits   [members, 1], rows of each member
    fewest   the least of them
    """

    joined: Joined
    first: Tensor | None
    limits: Tensor
    fewest: int


class OffsetBags:
    """Bags from tables [E_t, D], contiguous, of one dtype; they are kept alive, and read where they lie.

    mode          "sum" or "mean"
    include_last  whether offsets end with the number of indices
    Raises        ValueError for tables of several row lengths or dtypes, or not contiguous.
    """

    def __init__(self, tables: Sequence[Tensor], mode: str, include_last: bool) -> None:
        self.tables = tuple(tables)
        self.mode, self.include_last = MODES[mode], include_last
        self._addresses = list(map(_address, self.tables))
        huge_pages.advise(self.tables)
        self.parts = [_part(joined, self.tables) for joined in join_tables(self.tables)]
        self._latest: list[_Offsets | None] = [None] * len(self.parts)

    @property
    def is_worthwhile(self) -> bool:
        """Whether there are fewer joined tables than tables, and not many."""
        return len(self.parts) < len(self.tables) and len(self.parts) <= MOST_PARTS

    def is_current(self) -> bool:
        """Whether the tables lie where they lay."""
        return list(map(_address, self.tables)) == self._addresses

    def joined(self, indices: Sequence[Tensor], offsets: Tensor | Sequence[Tensor]) -> Tensor | None:
        """Return the bags [T, N, D] by one call per joined table; None where PyTorch has to say what they are.

        indices  [K_t] int32 or int64, one per table
        offsets  [T, N] of one of these dtypes, or [N] each; with include_last one more
        """
        lengths = [index.numel() for index in indices]
        if isinstance(offsets, Tensor):
            starts = offsets
        elif len({start.numel() for start in offsets}) > 1:
            return None
        else:
            starts = torch.cat(tuple(offsets)).view(len(self.tables), -1)
        if starts.shape[1] <= self.include_last:
            return None
        results = []
        for number, part in enumerate(self.parts):
            bags = self._bags(number, part, indices, lengths, starts)
            if bags is None:
                return None
            results.append(bags)
        if len(results) == 1:
            return results[0]
        whole = results[0].new_empty((len(self.tables), *results[0].shape[1:]))
        for part, bags in zip(self.parts, results, strict=True):
            whole[list(part.joined.members)] = bags
        return whole

    def each(self, indices: Sequence[Tensor], offsets: Tensor | Sequence[Tensor]) -> Tensor:
        """Return the same by one call per table: what is invalid raises PyTorch's error."""
        bags = [
            torch.embedding_bag(table, index, start, False, self.mode, False, None, self.include_last)[0]
            for table, index, start in zip(self.tables, indices, offsets, strict=True)
        ]
        return torch.stack(bags)

    def _bags(
        self, number: int, part: _Part, indices: Sequence[Tensor], lengths: list[int], starts: Tensor
    ) -> Tensor | None:
        """The bags [members, N, D] of one joined table."""
        members = part.joined.members
        if len(members) < len(indices):
            indices, lengths = [indices[m] for m in members], [lengths[m] for m in members]
            starts = starts[list(members)]
        if not any(lengths):
            return None
        known = self._latest[number]
        if known is None or not known.is_for(lengths, starts):
            known = _Offsets.of(lengths, starts, self.include_last)
            self._latest[number] = known
        if known.joined is None:
            return None
        rows = torch.cat(tuple(indices)) if len(indices) > 1 else indices[0]
        if not _in_range(rows, part, known.sizes):
            return None
        rows = rows.to(torch.int64)
        if part.first is not None:  # else nothing was copied yet
            if known.sizes is None:
                rows.view(len(members), -1).add_(part.first)
            else:
                rows.add_(torch.repeat_interleave(part.first.view(-1), known.sizes, output_size=rows.numel()))
        bags = torch.embedding_bag(part.joined.table, rows, known.joined, False, self.mode)[0]
        return bags.view(len(members), -1, bags.shape[1])


@dataclass(frozen=True)
class _Offsets:
    """What was made of offsets: most calls have those of the call before.

    lengths  indices of each table
    given    [members, N], a copy
    sizes    [members], the lengths; None where all are equal
    joined   [members * N] into the joined indices; None where they are no offsets
    """

    lengths: list[int]
    given: Tensor
    sizes: Tensor | None
    joined: Tensor | None

    @classmethod
    def of(cls, lengths: list[int], given: Tensor, include_last: bool) -> _Offsets:
        sizes, starts = whole(lengths), given.to(torch.int64)
        is_right = not include_last or torch.equal(starts[:, -1], sizes)
        starts = starts[:, :-1] if include_last else starts
        ends = sizes.cumsum(0)
        joined = (starts + (ends - sizes).view(-1, 1)).view(-1)
        # Each table's first offset is where the one before ends: so they ascend only if none points beyond its indices.
        is_right = is_right and not starts[:, 0].any() and bool((joined[1:] >= joined[:-1]).all())
        is_right = is_right and bool(joined[-1] <= ends[-1])
        is_even = all(length == lengths[0] for length in lengths)
        return cls(lengths, given.clone(), None if is_even else sizes, joined if is_right else None)

    def is_for(self, lengths: list[int], given: Tensor) -> bool:
        return lengths == self.lengths and given.dtype == self.given.dtype and torch.equal(given, self.given)


def _part(joined: Joined, tables: Sequence[Tensor]) -> _Part:
    rows = [tables[m].shape[0] for m in joined.members]
    first = whole(joined.first).view(-1, 1) if len(rows) > 1 else None
    return _Part(joined, first, whole(rows).view(-1, 1), min(rows))


def _in_range(rows: Tensor, part: _Part, sizes: Tensor | None) -> bool:
    """Whether every index is a row of its table; sizes: how many each table has, None where all have as many."""
    lowest, highest = torch.aminmax(rows)
    if lowest.item() < 0:
        return False
    if highest.item() < part.fewest:
        return True
    if sizes is None:
        return bool((rows.view(part.limits.shape[0], -1) < part.limits).all())
    return bool((rows < torch.repeat_interleave(part.limits.view(-1), sizes, output_size=rows.numel())).all())
