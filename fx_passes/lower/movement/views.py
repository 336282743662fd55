"""Operations that only change how a tensor is seen: views, and copies of a part in one reorder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fx_passes import ops
from fx_passes.candidates.boxes import box_reorder
from fx_passes.candidates.candidates import Argument, Candidate, Operand, Operation, PrimitiveTemplate, Result
from fx_passes.candidates.layouts import activation_layouts, row_major, strided
from fx_passes.lower.context import LoweringContext, NotLowered
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC


def lower_contiguous(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.contiguous, and ops.expand to the shape src has: src itself, in any layout."""
    src_node = context.values.arguments(node)["src"]
    src, spec = context.tensor(src_node, "src"), context.values.specs[node]
    if src.shape != spec.shape:
        raise NotLowered("repeats values: PyTorch broadcasts them")
    operation = Operation(node, node.name, "view", (src_node,), spec)
    for desc in activation_layouts(src.shape or (1,), context.dtype(src)):
        operation.candidates.append(Candidate("view", (desc,), desc, ()))
    return operation


def lower_unsqueeze(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.unsqueeze: any plain layout of src, seen with one dimension more."""
    arguments = context.values.arguments(node)
    src, spec = context.tensor(arguments["src"], "src"), context.values.specs[node]
    dtype, dim = context.dtype(src), arguments["dim"] % (src.ndim + 1)
    if not src.ndim:
        raise NotLowered("one number has no dimensions")
    operation = Operation(node, node.name, "view", (arguments["src"],), spec)
    for desc in activation_layouts(src.shape, dtype):
        if (steps := desc.strides) is None:
            continue
        inserted = steps[dim] * src.shape[dim] if dim < src.ndim else 1
        dst = strided(spec.shape, dtype, (*steps[:dim], inserted, *steps[dim:]))
        operation.candidates.append(Candidate("view", (desc,), dst, ()))
    return operation


def lower_index(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.index by numbers, slices of step 1, None and ...: a box of src, copied out by one reorder."""
    arguments = context.values.arguments(node)
    src, spec = context.tensor(arguments["src"], "src"), context.values.specs[node]
    dtype = context.dtype(src)
    box = index_box(arguments["item"], src.shape)
    if box is None or not src.ndim:
        raise NotLowered("an index that is not a box of its source")
    offsets, sizes = box
    operation = Operation(node, node.name, "reorder", (arguments["src"],), spec)
    whole = row_major(src.shape, dtype)
    pd = box_reorder(whole, row_major(sizes, dtype), offsets)
    if pd is None:
        raise NotLowered("no reorder copies this part")
    args: dict[int, Argument] = {ARG_SRC: Operand(0, pd.src_desc), ARG_DST: Result(pd.dst_desc)}
    dst = row_major(spec.shape or (1,), dtype)
    template = PrimitiveTemplate(pd, args, "reorder")
    operation.candidates.append(Candidate(pd.implementation, (whole,), dst, (template,)))
    return operation


def index_box(item: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(offsets, sizes) per dimension of what item selects, dimensions not dropped; None where it is no box."""
    items = list(item) if isinstance(item, tuple | list) else [item]
    items = [i for i in items if i is not None]
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    items += [slice(None)] * (len(shape) - len(items))
    if len(items) != len(shape) or Ellipsis in items:
        return None
    offsets, sizes = [], []
    for entry, size in zip(items, shape, strict=True):
        if isinstance(entry, slice):
            start, stop, step = entry.indices(size)
            if step != 1 or stop <= start:
                return None
            offsets.append(start)
            sizes.append(stop - start)
        elif isinstance(entry, int) and not isinstance(entry, bool):
            offsets.append(entry % size)
            sizes.append(1)
        else:
            return None
    return tuple(offsets), tuple(sizes)


VIEW_RULES: dict[Callable[..., object], Callable[[fx.Node, LoweringContext], Operation]] = {
    ops.contiguous: lower_contiguous,
    ops.expand: lower_contiguous,
    ops.unsqueeze: lower_unsqueeze,
    ops.index: lower_index,
}
