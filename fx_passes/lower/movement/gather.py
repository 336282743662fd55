"""Elements at constant places, as the pairs of a recommender out of a triangle; rows at given places."""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from fx_passes.candidates.candidates import Candidate, Operand, Operation, Result, TorchTemplate
from fx_passes.candidates.layouts import row_major
from fx_passes.lower.context import LoweringContext, NotLowered, eager_layout
from zendnn_cffi.runtime.joined_tables import INDEX_DTYPES


def lower_pick(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.pick over all dimensions from `dim` on to one gather from rows, written into the arena."""
    arguments = context.values.arguments(node)
    src, spec = context.tensor(arguments["src"], "src"), context.values.specs[node]
    dim, dtype = arguments["dim"], context.dtype(src)
    places = _places(src.shape[dim:], arguments["indices"])
    samples = src.numel // math.prod(src.shape[dim:])
    every = places.expand(samples, -1)

    def gather(x: Tensor, out: Tensor) -> None:
        torch.gather(x.view(samples, -1), 1, every, out=out.view(samples, -1))

    template = TorchTemplate(gather, "", into=True)
    candidate = Candidate("torch", (row_major(src.shape, dtype),), row_major(spec.shape, dtype), (template,))
    return Operation(node, node.name, "pick", (arguments["src"],), spec, [candidate])


def lower_take_rows(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.take_rows to one selection of rows, written into the arena."""
    arguments, spec = context.values.arguments(node), context.values.specs[node]
    src, indices = context.tensor(arguments["src"], "src"), context.tensor(arguments["indices"], "indices")
    dtype = context.dtype(src)
    if indices.dtype not in INDEX_DTYPES:
        raise NotLowered(f"indices of {indices.dtype}")

    def select(x: Tensor, places: Tensor, out: Tensor) -> None:
        torch.index_select(x, 0, places.reshape(-1), out=out)

    rows, taken = (row_major((n, spec.shape[-1]), dtype) for n in (src.numel // src.shape[-1], indices.numel))
    template = TorchTemplate(select, "", into=True, args=(Operand(0, rows), Operand(1), Result(taken)))
    srcs = (row_major(src.shape, dtype), eager_layout(indices))
    candidate = Candidate("torch", srcs, row_major(spec.shape, dtype), (template,))
    return Operation(node, node.name, "take_rows", (arguments["src"], arguments["indices"]), spec, [candidate])


def _places(shape: tuple[int, ...], indices: tuple[Tensor, ...]) -> Tensor:
    """Where the elements lie in row-major order of `shape`, [K]."""
    if len(indices) != len(shape) or any(i.ndim != 1 or i.shape != indices[0].shape for i in indices):
        raise NotLowered("picks whole slices, or in several dimensions")
    if not indices[0].numel():
        raise NotLowered("picks nothing")
    places = torch.zeros(indices[0].shape, dtype=torch.int64, device="cpu")
    for index, size in zip(indices, shape, strict=True):
        if index.min() < -size or index.max() >= size:
            raise NotLowered("picks what is not there")
        places = places * size + index.to(torch.int64) % size
    return places
