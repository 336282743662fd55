"""Views of values as they lie: no copy, whatever plain strides the producer leaves.

    wide [B, L, 3 H D] --reshape--> [B, L, 3 H, D] --narrow--> [B, L, H, D] --transpose--> [B, H, L, D]

Each step only changes strides and the offset of the first element, as in eager; PyTorch itself says how, on a tensor
without memory. The rule of the operation offers what it can copy as well, and layout assignment chooses.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.candidates import Candidate, Operation
from fx_passes.candidates.layouts import Quantized, row_major, strided
from fx_passes.lower.context import LoweringContext, NotLowered
from zendnn_cffi.errors import ZenDNNError

# What may be computed by looking at the source's memory in another way.
VIEWS: frozenset[Callable[..., Any]] = ops.having(view=True) | {operator.getitem}


def add_views(operation: Operation | None, node: fx.Node, context: LoweringContext) -> Operation | None:
    """Add a view candidate for every plain layout of the source that allows one; make the operation if there is none.

    None where neither a rule nor a view computes node.
    """
    source, function = _source(node, context)
    if source is None or source not in context.values.specs:
        return operation
    src, spec = context.values.specs[source], context.values.specs[node]
    if not src.numel or not spec.numel:
        return operation
    try:
        dtype = context.dtype(src)
    except NotLowered:
        return operation
    if operation is None:
        operation = Operation(node, node.name, "view", (source,), spec)
    elif operation.operands != (source,):
        return operation
    known = {(c.srcs, c.dst) for c in operation.candidates if c.is_view}
    for steps in context.plain_strides(source):
        view = _view(function, src.shape, steps)
        if view is None or tuple(view.shape) != spec.shape:
            continue
        try:
            have, dst = strided(src.shape or (1,), dtype, steps or (1,)), _described(view, dtype)
        except (ZenDNNError, ValueError):
            continue  # the library does not describe every set of strides, nor more than 12 dimensions
        if ((have,), dst) not in known:
            offset = view.storage_offset() * dtype.itemsize
            operation.candidates.append(Candidate("view", (have,), dst, (), offset_bytes=offset))
    operation.candidates += _of_integers(operation, source, function, context)
    return operation if operation.candidates else None


def _of_integers(
    operation: Operation, source: fx.Node, function: Callable[[torch.Tensor], Any], context: LoweringContext
) -> Iterator[Candidate]:
    """Views of the source where it lies as integers."""
    producer = context.operations.get(source)
    layouts = () if producer is None else dict.fromkeys(c.dst for c in producer.candidates)
    for have in layouts:
        if not isinstance(have, Quantized) or have.strides is None or have.dims != context.values.specs[source].shape:
            continue
        view = _view(function, have.dims, have.strides)
        if view is None or tuple(view.shape) != operation.spec.shape or not operation.spec.shape:
            continue
        try:
            dst = Quantized(_described(view, have.dtype), have.numerics)
        except (ZenDNNError, ValueError):
            continue
        offset = view.storage_offset() * have.dtype.itemsize
        yield Candidate("view", (have,), dst, (), offset_bytes=offset)


def _source(node: fx.Node, context: LoweringContext) -> tuple[fx.Node | None, Callable[[torch.Tensor], Any]]:
    """What node looks at, and the function of it that node is."""
    if node.target is operator.getitem:
        pieces, item = node.args
        if not isinstance(pieces, fx.Node) or pieces.target not in ops.PIECES or not isinstance(item, int):
            return None, _nothing
        rest = context.values.concrete((pieces.args[1:], pieces.kwargs))
        return pieces.args[0], lambda t: pieces.target(t, *rest[0], **rest[1])[item]
    args, kwargs = context.values.concrete((node.args[1:], node.kwargs))
    if node.target in (ops.reshape, ops.reshape_as, ops.flatten, ops.unflatten):
        shape = context.values.specs[node].shape
        return node.args[0], lambda t: t.view(shape)
    if node.target is ops.contiguous:
        return node.args[0], lambda t: t
    return node.args[0] if node.args else None, lambda t: node.target(t, *args, **kwargs)


def _nothing(tensor: torch.Tensor) -> Any:
    return None


def _view(function: Callable[[torch.Tensor], Any], shape: tuple[int, ...], steps: tuple[int, ...]) -> Any:
    """The view as a tensor without memory; None where strides do not allow it."""
    try:
        return function(torch.empty_strided(shape, steps, dtype=torch.float32, device="meta"))
    except (RuntimeError, TypeError, IndexError):
        return None


def _described(view: torch.Tensor, dtype: torch.dtype) -> Any:
    shape = tuple(view.shape)
    if view.is_contiguous():
        return row_major(shape or (1,), dtype)  # one spelling, whatever the strides of dimensions of size one
    return strided(shape, dtype, tuple(view.stride()))
