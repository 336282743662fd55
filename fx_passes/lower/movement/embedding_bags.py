"""Bags of all tables that feed one concatenation: one call over joined tables, written where the concatenation lies.

PyTorch's kernel for bags reads ahead, and is faster than ZenDNN's; what costs time is calling it once per table. The
tables become one (zendnn_cffi.runtime.joined_tables), and the bags of all are one call. Rows of tables that differ in
row length are one call for each length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fx_passes import ops
from fx_passes.candidates.candidates import Argument, Candidate, Operand, Operation, Result, TorchTemplate, Weights
from fx_passes.candidates.layouts import row_major
from fx_passes.lower.context import LoweringContext, NotLowered, eager_layout
from fx_passes.lower.movement.concat_bags import side_by_side
from zendnn_cffi.runtime.joined_tables import INDEX_DTYPES, BagGroup, RowGroup, by_row_length, join_tables

_COPIED_BYTES = 256 << 20


def lower_embedding_bags(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.embedding_bags; the tables stay where they are unless their dtype changes."""
    arguments = context.values.arguments(node)
    spec, mode = context.values.specs[node], arguments["mode"]
    dtype = context.dtype(spec)
    if spec.ndim != 2:
        raise NotLowered("rows of more than two dimensions")
    tables = [context.constant(table, "a table") for table in arguments["weights"]]
    stacked = isinstance(arguments["indices"], fx.Node)
    indices = [arguments["indices"]] if stacked else list(arguments["indices"])
    index_specs = [context.tensor(index, "an index tensor") for index in indices]
    beside = [[(piece, context.tensor(piece, "a piece")) for piece in arguments[side]] for side in ("before", "after")]
    pieces = [entry for side in beside for entry in side]
    if len({spec.dtype, *(s.dtype for _, s in pieces), *(t.dtype for t in tables)}) > 1:
        raise NotLowered("pieces of different dtypes are promoted by PyTorch")
    if any(s.dtype not in INDEX_DTYPES for s in index_specs):
        raise NotLowered("indices are neither int32 nor int64")
    if mode == "row":
        lengths = [1] * len(tables)
    else:
        lengths = [index_specs[0].shape[2]] * len(tables) if stacked else [s.shape[1] for s in index_specs]
    before, after = ([s.shape[1] for _, s in side] for side in beside)
    weights: tuple[Weights, ...] = ()
    given = []
    for members in by_row_length(tables):
        of_length = _weights([node.args[0][m] for m in members], [tables[m] for m in members], dtype)
        weights += of_length
        given.append((members, len(of_length)))
    call = _BagsCall(mode, lengths, _Given([t.shape[0] for t in tables], given), stacked, (before, after), spec.shape)
    srcs = (*map(eager_layout, index_specs), *(row_major(s.shape, dtype) for _, s in pieces))
    operands = (*indices, *(piece for piece, _ in pieces))
    args: tuple[Argument, ...] = (*map(Operand, range(len(operands))), *weights, Result())
    template = TorchTemplate(call, "", into=True, args=args)
    candidate = Candidate("torch", srcs, row_major(spec.shape, dtype), (template,))
    return Operation(node, node.name, "embedding_bags", operands, spec, [candidate])


def _weights(names: Any, tables: Sequence[Tensor], dtype: torch.dtype) -> tuple[Weights, ...]:
    """The tables where they are; as one copy where they are copied anyway, or are few bytes that cannot be joined."""
    in_place = all(table.dtype == dtype and table.is_contiguous() for table in tables)
    size_bytes = sum(table.numel() for table in tables) * dtype.itemsize
    if in_place and (size_bytes > _COPIED_BYTES or len(join_tables(tables)) == 1):
        return tuple(Weights(str(n), t, row_major(tuple(t.shape), dtype)) for n, t in zip(names, tables, strict=True))
    desc = row_major((sum(table.shape[0] for table in tables), tables[0].shape[1]), dtype)
    return (Weights(" ".join(map(str, names)), tables[0], desc, tuple(tables[1:])),)


class _Given:
    """How tables come to the call: those of one row length each by itself, or all as one tensor, one under the other.

    rows   of each table
    parts  (numbers of the tables of one row length, how many tensors they come as)
    """

    def __init__(self, rows: Sequence[int], parts: Sequence[tuple[Sequence[int], int]]) -> None:
        self.rows, self.parts = rows, parts
        self.are_equally_long = len(parts) == 1

    def each(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tables one by one."""
        found: dict[int, Tensor] = {}
        begin = 0
        for members, count in self.parts:
            part = tensors[begin : begin + count]
            begin += count
            found.update(
                zip(members, part if count > 1 else part[0].split([self.rows[m] for m in members]), strict=True)
            )
        return [found[number] for number in range(len(self.rows))]


class _BagsCall:
    """function(*indices, *before, *after, *tables, result).

    lengths  indices per bag, for each table
    given    how the tables come
    stacked  whether indices are one tensor [N, T or more, L], else one [N, L_t] per table; without L in mode "row"
    beside   widths of the pieces before and after
    shape    of the result
    """

    def __init__(
        self,
        mode: str,
        lengths: Sequence[int],
        given: _Given,
        stacked: bool,
        beside: tuple[Sequence[int], Sequence[int]],
        shape: tuple[int, ...],
    ) -> None:
        self.mode, self.lengths, self.given, self.stacked = mode, lengths, given, stacked
        self.batch, width = shape
        before, after = beside
        self.bags = slice(sum(before), width - sum(after))
        self.places = [*side_by_side(0, before), *side_by_side(self.bags.stop, after)]
        self.before = len(before)
        self.first_piece = 1 if stacked else len(lengths)
        self.first_table = self.first_piece + len(self.places)
        self._groups: dict[tuple[int, ...], BagGroup | RowGroup] = {}

    def __call__(self, *tensors: Tensor) -> None:
        tables, out = tensors[self.first_table : -1], tensors[-1]
        self.run(tensors, self._group(tables), self.parts_of(out), out)

    def bound(self, tensors: Sequence[Tensor | None]) -> Callable[..., None]:
        """Where tables and result stay where they are, only indices and pieces are looked at in each run."""
        fixed = [tensor for tensor in tensors[self.first_table :] if tensor is not None]
        if len(fixed) < len(tensors) - self.first_table:
            return self
        *tables, out = fixed
        group, parts = self._group(tuple(tables)), self.parts_of(out)

        def run(*tensors: Tensor) -> None:
            self.run(tensors, group, parts, out)

        return run

    def parts_of(self, out: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Where bags [N, T, D] and pieces go."""
        bags = out[:, self.bags].unflatten(1, (len(self.lengths), -1)) if self.given.are_equally_long else out
        return bags, [out[:, place] for place in self.places]

    def run(
        self,
        tensors: Sequence[Tensor],
        group: BagGroup | RowGroup,
        parts: tuple[Tensor, list[Tensor]],
        out: Tensor,
    ) -> None:
        """Compute with tables that were joined and parts of the result that were made before."""
        count = len(self.lengths)
        indices, pieces = tensors[: self.first_piece], tensors[self.first_piece : self.first_table]
        if self.stacked:
            own = indices[0] if indices[0].shape[1] == count else indices[0][:, :count]
            flat = own.reshape(self.batch, -1)
        else:
            flat = torch.stack(indices, 1) if self.mode == "row" else torch.cat(indices, 1)
        if not group.in_range(flat):
            ops.embedding_bags(group.tables, indices[0] if self.stacked else indices, self.mode)  # PyTorch's error
            raise IndexError("embedding_bag: an index is not in its table")
        if isinstance(group, RowGroup):
            group.run_into(flat, out, pieces[: self.before], pieces[self.before :])
            return
        group.run_into(flat, parts[0])
        for piece, part in zip(pieces, parts[1], strict=True):
            part.copy_(piece)

    def _group(self, tables: tuple[Tensor, ...]) -> BagGroup | RowGroup:
        """The joined tables, made once for tensors at these addresses."""
        addresses = tuple(map(Tensor.data_ptr, tables))
        group = self._groups.get(addresses)
        if group is None:
            with torch.inference_mode(False):
                each = self.given.each(tables)
                if self.given.are_equally_long:
                    group = BagGroup(each, self.lengths, self.batch, "sum" if self.mode == "row" else self.mode)
                else:
                    group = RowGroup(each)
            self._groups = {addresses: group}
        return group
