"""Operations that move or regroup data: views where the layout allows, reorders where not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.boxes import box_reorder, roll_reorders
from fx_passes.candidates.candidates import Argument, Candidate, Operand, Operation, PrimitiveTemplate, Result
from fx_passes.candidates.layouts import (
    Layout,
    Quantized,
    activation_layouts,
    in_memory,
    layout,
    row_major,
    same_bytes,
    spatial_tags,
    strided,
)
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.context import LoweringContext, NotLowered
from fx_passes.lower.quantized import integer_layouts, integer_layouts_of, numerics_of
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC
from zendnn_cffi.primitives.memory import MemoryDesc


def lower_reshape(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.reshape, reshape_as, flatten and unflatten: the row-major bytes of src, seen with another shape."""
    src_node = context.values.arguments(node)["src"]
    src, spec = context.tensor(src_node, "src"), context.values.specs[node]
    dtype = context.dtype(src)
    operation = Operation(node, node.name, "view", (src_node,), spec)
    whole, seen = row_major(src.shape, dtype), row_major(spec.shape or (1,), dtype)
    operation.candidates.append(Candidate("view", (whole,), seen, ()))
    if (numerics := numerics_of(node, context.values)) is not None:
        kept, then = (Quantized(row_major(shape, numerics.dtype), numerics) for shape in (whole.dims, seen.dims))
        operation.candidates.append(Candidate("view", (kept,), then, ()))
    return operation


def lower_permute(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.permute and ops.transpose: any plain layout of src, seen with its dimensions in another order."""
    arguments = context.values.arguments(node)
    src, spec = context.tensor(arguments["src"], "src"), context.values.specs[node]
    dtype, ndim = context.dtype(src), src.ndim
    if node.target is ops.permute:
        axes = [d % ndim for d in arguments["dims"]]
    else:
        axes = list(range(ndim))
        i, j = arguments["dim0"] % ndim, arguments["dim1"] % ndim
        axes[i], axes[j] = axes[j], axes[i]
    operation = Operation(node, node.name, "view", (arguments["src"],), spec)
    plain = [row_major(src.shape, dtype), *(layout(src.shape, dtype, tag) for tag in spatial_tags(ndim)[:1])]
    for desc in plain:
        steps = desc.strides
        assert steps is not None
        dst = strided(spec.shape, dtype, tuple(steps[a] for a in axes))
        operation.candidates.append(Candidate("view", (desc,), dst, ()))
    if (numerics := numerics_of(node, context.values)) is not None:
        for desc in integer_layouts_of(arguments["src"], numerics.dtype, context):
            steps = desc.strides
            assert steps is not None
            kept = strided(spec.shape, numerics.dtype, tuple(steps[a] for a in axes))
            views = Quantized(desc, numerics), Quantized(kept, numerics)
            operation.candidates.append(Candidate("view", views[:1], views[1], ()))
    return operation


def lower_narrow(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.narrow, and one piece of what ops.PIECES cut: a copy out of the box."""
    arguments = context.values.arguments(node)
    src = context.tensor(arguments["src"], "src")
    start, _, step = slice(arguments["start"], arguments["stop"]).indices(src.shape[arguments["dim"] % src.ndim])
    assert step == 1
    return _box(node, context, arguments["src"], arguments["dim"] % src.ndim, start)


def lower_getitem(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower operator.getitem of what ops.PIECES cut."""
    pieces, index = node.args
    if not isinstance(pieces, fx.Node) or pieces.target not in ops.PIECES or not isinstance(index, int):
        raise NotLowered("the item of something that is not cut in pieces")
    arguments = context.values.arguments(pieces)
    src = context.tensor(arguments["src"], "src")
    dim = arguments["dim"] % src.ndim
    whole = torch.empty(src.shape, dtype=torch.float32, device="meta")
    piece = pieces.target(**{**arguments, "src": whole})[index]  # pieces may overlap, and leave gaps
    return _box(node, context, arguments["src"], dim, piece.storage_offset() // whole.stride(dim))


def _box(node: fx.Node, context: LoweringContext, src_node: fx.Node, dim: int, start: int) -> Operation:
    """src from `start` along dim, copied into memory of its own by one reorder, in every layout."""
    src, spec = context.tensor(src_node, "src"), context.values.specs[node]
    dtype = context.dtype(src)
    if spec.numel == 0:
        raise NotLowered("an empty slice")
    offsets = [start if d == dim else 0 for d in range(src.ndim)]
    operation = Operation(node, node.name, "reorder", (src_node,), spec)
    layouts: list[tuple[Layout, Layout]] = [
        *zip(activation_layouts(src.shape, dtype), activation_layouts(spec.shape, dtype), strict=True)
    ]
    if (numerics := numerics_of(node, context.values)) is not None:
        kept = (integer_layouts(shape, numerics.dtype) for shape in (src.shape, spec.shape))
        layouts += [(Quantized(a, numerics), Quantized(b, numerics)) for a, b in zip(*kept, strict=True)]
    for whole, piece in layouts:
        pd = box_reorder(in_memory(whole), in_memory(piece), offsets)
        if pd is not None:
            args: dict[int, Argument] = {ARG_SRC: Operand(0, pd.src_desc), ARG_DST: Result(pd.dst_desc)}
            template = PrimitiveTemplate(pd, args, "reorder")
            operation.candidates.append(Candidate(pd.implementation, (whole,), piece, (template,)))
    if not operation.candidates:
        raise NotLowered("no reorder copies this slice")
    return operation


def lower_roll(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.roll: a reorder for each part that stays together, in every layout that can be cut there."""
    arguments = context.values.arguments(node)
    src, spec = context.tensor(arguments["src"], "src"), context.values.specs[node]
    dtype = context.dtype(src)
    if spec.numel == 0:
        raise NotLowered("an empty tensor")
    shifts = [0] * src.ndim
    for shift, dim in zip(arguments["shifts"], arguments["dims"], strict=True):
        shifts[dim % src.ndim] += shift
    operation = Operation(node, node.name, "roll", (arguments["src"],), spec)
    layouts: list[Layout] = [*activation_layouts(src.shape, dtype)]
    if (numerics := numerics_of(node, context.values)) is not None:
        layouts += [Quantized(desc, numerics) for desc in integer_layouts(src.shape, numerics.dtype)]
    for each in layouts:
        calls = tuple(
            PrimitiveTemplate(pd, {ARG_SRC: Operand(0, pd.src_desc), ARG_DST: Result(pd.dst_desc)}, "reorder")
            for pd in roll_reorders(in_memory(each), shifts)
        )
        if calls:
            operation.candidates.append(Candidate("reorder", (each,), each, calls))
    if not operation.candidates:
        raise NotLowered("no layout can be cut where it is rolled")
    return operation


def lower_concat(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.concat: one reorder per piece into its slice of the result, in every layout that can be cut there."""
    arguments = context.values.arguments(node)
    pieces, spec = list(arguments["srcs"]), context.values.specs[node]
    specs = [context.tensor(piece, f"piece {i}") for i, piece in enumerate(pieces)]
    if len({s.dtype for s in specs}) > 1:
        raise NotLowered("pieces of different dtypes are promoted by PyTorch")
    dtype, dim = context.dtype(spec), arguments["dim"] % spec.ndim
    operation = Operation(node, node.name, "concat", tuple(pieces), spec)
    for number, whole in enumerate(activation_layouts(spec.shape, dtype)):
        descs = [activation_layouts(s.shape, dtype)[number] for s in specs]
        candidate = _concat_candidate(whole, descs, dim)
        if candidate is not None:
            operation.candidates.append(candidate)
    operation.candidates += _concat_of_integers(operation, specs, dim, context)
    if not operation.candidates:
        raise NotLowered("no layout can be cut at these pieces")
    return operation


def _concat_of_integers(
    operation: Operation, specs: Sequence[TensorSpec], dim: int, context: LoweringContext
) -> Iterator[Candidate]:
    """The concatenation of integers that all stand for the same numbers."""
    numerics = numerics_of(operation.node, context.values)
    if numerics is None:
        return
    for number, whole in enumerate(integer_layouts(operation.spec.shape, numerics.dtype)):
        descs = [integer_layouts(s.shape, numerics.dtype)[number] for s in specs]
        candidate = _concat_candidate(whole, descs, dim)
        if candidate is not None:
            srcs = tuple(Quantized(desc, numerics) for desc in descs)
            yield replace(candidate, srcs=srcs, dst=Quantized(whole, numerics))


def _concat_candidate(whole: MemoryDesc, descs: Sequence[MemoryDesc], dim: int) -> Candidate | None:
    calls, start = [], 0
    for index, desc in enumerate(descs):
        offsets = [start if d == dim else 0 for d in range(whole.ndim)]
        pd = box_reorder(whole, desc, offsets, into=True)
        if pd is None:
            return None
        args: dict[int, Argument] = {ARG_SRC: Operand(index, pd.src_desc), ARG_DST: Result(pd.dst_desc)}
        calls.append(PrimitiveTemplate(pd, args, "reorder"))
        start += desc.dims[dim]
    implementation = "in place" if (slices := _dense_slices(whole, descs, dim)) else "reorder"
    return Candidate(implementation, tuple(descs), whole, tuple(calls), slices_bytes=slices)


def _dense_slices(whole: MemoryDesc, descs: Sequence[MemoryDesc], dim: int) -> tuple[int, ...]:
    """The offset of each piece in the result, in bytes, where every piece lies there as it lies alone; () where not.

    So it is with blocks of channels at batch 1, and wherever nothing but ones stands before the dimension joined.
    """
    slices, start = [], 0
    for desc in descs:
        box, offset_bytes = whole.submemory(desc.dims, [start if d == dim else 0 for d in range(whole.ndim)]).rebased()
        if not same_bytes(box, desc):
            return ()
        slices.append(offset_bytes)
        start += desc.dims[dim]
    return tuple(slices) if sum(d.size_bytes for d in descs) == whole.size_bytes else ()
