"""Rows of a table into the arena, by PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fx_passes.candidates.candidates import Candidate, Operand, Operation, Result, TorchTemplate, Weights
from fx_passes.candidates.layouts import row_major
from fx_passes.lower.context import LoweringContext, NotLowered, eager_layout
from zendnn_cffi.runtime.joined_tables import INDEX_DTYPES


def lower_embedding(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.embedding, in the table's own dtype: it stays where it is."""
    arguments, spec = context.values.arguments(node), context.values.specs[node]
    table = context.constant(arguments["weight"], "the table")
    indices = context.tensor(arguments["indices"], "indices")
    if indices.dtype not in INDEX_DTYPES or not table.is_contiguous():
        raise NotLowered(f"indices of {indices.dtype}, or a table that is not contiguous")

    def select(places: Tensor, rows: Tensor, out: Tensor) -> None:
        torch.index_select(rows, 0, places.reshape(-1), out=out)

    weights = Weights(str(node.args[0]), table, row_major(tuple(table.shape), table.dtype), is_streamed=False)
    rows = row_major((indices.numel, table.shape[1]), table.dtype)
    template = TorchTemplate(select, "", into=True, args=(Operand(0), weights, Result(rows)))
    dst = row_major(spec.shape, table.dtype)
    candidate = Candidate("torch", (eager_layout(indices),), dst, (template,))
    return Operation(node, node.name, "embedding", (arguments["indices"],), spec, [candidate])
