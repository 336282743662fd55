"""An independent reading of a Program: which bytes of the arena each call reads and writes, and what follows from it.

Nothing here shares code with the planner: bytes come from the calls' slots and descriptors, liveness from those bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fx_passes.candidates.layouts import row_major
from zendnn_cffi.engine.library import load
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_DST_ITER, ARG_DST_ITER_C, ARG_SCRATCHPAD
from zendnn_cffi.runtime.arenas import Arena
from zendnn_cffi.runtime.calls import PrimitiveCall, TorchCall
from zendnn_cffi.runtime.context import Context
from zendnn_cffi.runtime.gemm_call import GemmCall
from zendnn_cffi.runtime.places import Slot
from zendnn_cffi.runtime.program import Program

ALIGNMENT_BYTES = 64
POISON = 0xFF  # every float made of such bytes is a NaN


@dataclass(frozen=True)
class Touched:
    """What one call does to the arena: masks of bytes."""

    reads: np.ndarray
    writes: np.ndarray
    scratchpad: np.ndarray
    spans: tuple[tuple[int, int], ...]
    written_spaces: tuple[str, ...]


def element_offsets(desc: Any) -> np.ndarray:
    """Byte offset of every element, padding included, that a memory descriptor (or tensor view) names."""
    if not hasattr(desc, "inner_blocks"):  # a torch view, or a dtype that the library lacks
        return _plain(desc.shape if hasattr(desc, "shape") else desc.dims, desc.strides, desc.dtype.itemsize)
    item = desc.dtype.itemsize
    if desc.outer_strides is None:
        return np.arange(0, desc.size_bytes, item)
    blocks = dict.fromkeys(range(desc.ndim), 1)
    for axis, size in desc.inner_blocks:
        blocks[axis] *= size
    padded = [-(-n // blocks[d]) for d, n in enumerate(desc.dims)]
    offsets = _plain(padded, desc.outer_strides, item)
    inner = int(np.prod([size for _, size in desc.inner_blocks], dtype=np.int64))
    return (offsets[:, None] + np.arange(inner) * item).reshape(-1) + desc.offset0 * item


def _plain(shape: Sequence[int], strides: Sequence[int], item: int) -> np.ndarray:
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in zip(shape, strides, strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride * item).reshape(-1)
    return offsets


def _mask(program: Program, slot: Slot, desc: Any) -> np.ndarray:
    mask = np.zeros(program.arena_bytes, dtype=bool)
    if slot.space == "arena":
        item = desc.dtype.itemsize
        first = element_offsets(desc) + slot.offset_bytes
        for byte in range(item):
            mask[first + byte] = True
    return mask


def _union(program: Program, masks: Sequence[np.ndarray]) -> np.ndarray:
    return np.logical_or.reduce([np.zeros(program.arena_bytes, dtype=bool), *masks])


def touched(program: Program, call: Any) -> Touched:
    """Return the arena bytes that one call reads and writes."""
    if isinstance(call, TorchCall):
        reads = [_mask(program, view.slot, view) for view in call.srcs]
        writes, pads = [_mask(program, call.dst.slot, call.dst)], []
        spans, spaces = _spans((v.slot, v) for v in (*call.srcs, call.dst)), (call.dst.slot.space,)
    elif isinstance(call, GemmCall):
        m, k, n = call.gemm.sizes
        src, dst = row_major((m, k), call.gemm.dtype), row_major((m, n), call.gemm.result)
        reads = [_mask(program, *where) for where in ((call.src, src), *call.operands)]
        writes, pads = [_mask(program, call.dst, dst)], []
        spans, spaces = _spans([(call.src, src), (call.dst, dst), *call.operands]), (call.dst.space,)
    else:
        assert isinstance(call, PrimitiveCall)
        args = call.args
        written = [arg for arg in (ARG_DST, ARG_DST_ITER, ARG_DST_ITER_C) if arg in args]
        writes = [_mask(program, *args[arg]) for arg in written]
        pads = [_mask(program, *args[ARG_SCRATCHPAD])] if ARG_SCRATCHPAD in args else []
        reads = [_mask(program, *where) for arg, where in args.items() if arg not in (*written, ARG_SCRATCHPAD)]
        if any(entry[0] == "sum" for entry in call.primitive.pd.attr.post_ops):
            reads += writes
        spans = _spans(args.values())
        spaces = tuple(args[a][0].space for a in (*written, ARG_SCRATCHPAD) if a in args)
        for arg in args.keys() - {*written, ARG_SCRATCHPAD}:
            for result in written:
                assert not _collide(args[arg], args[result]), f"{call.name} writes over what it has yet to read"
    return Touched(_union(program, reads), _union(program, writes), _union(program, pads), spans, spaces)


def _collide(read: tuple[Slot, Any], written: tuple[Slot, Any]) -> bool:
    """Whether the two share bytes without being the same elements at the same places."""
    (slot, desc), (other, result) = read, written
    if (slot.space, slot.index) != (other.space, other.index) or slot.space not in ("arena", "output"):
        return False
    first, second = element_offsets(desc) + slot.offset_bytes, element_offsets(result) + other.offset_bytes
    if first.size == second.size and (first == second).all():
        return desc.dtype.itemsize != result.dtype.itemsize
    width = max(desc.dtype.itemsize, result.dtype.itemsize)
    return bool(np.isin(first // width, second // width).any())


def check_plan(program: Program) -> list[np.ndarray]:
    """Assert what any plan must keep to; return, per call, the arena bytes that are live before it."""
    calls = [touched(program, call) for call in program.calls]
    live = np.zeros(program.arena_bytes, dtype=bool)
    before: list[np.ndarray] = []
    for call, made in zip(reversed(program.calls), reversed(calls), strict=True):
        after = live
        assert not (made.scratchpad & after).any(), f"{call.name}: its scratchpad overwrites what is read later"
        assert not (made.scratchpad & (made.reads | made.writes)).any(), f"{call.name}: its scratchpad lies on operands"
        live = (after & ~made.writes) | made.reads
        before.append(live)
        assert set(made.written_spaces) <= {"arena", "output"}, f"{call.name} writes into {made.written_spaces}"
    _check_alignment({span for made in calls for span in made.spans}, program)
    assert not live.any(), "something is read that no call wrote"
    return before[::-1]


def _spans(places: Iterable[tuple[Slot, Any]]) -> tuple[tuple[int, int], ...]:
    """First byte and end of what lies in the arena."""
    found = []
    for slot, desc in places:
        if slot.space == "arena" and (offsets := element_offsets(desc)).size:
            found.append((slot.offset_bytes, slot.offset_bytes + int(offsets.max()) + desc.dtype.itemsize))
    return tuple(found)


def _check_alignment(spans: set[tuple[int, int]], program: Program) -> None:
    """Everything starts on a cache line, or lies within something that does (a piece of a concatenation).

    Or it adjoins such (numbers of one result that are computed one after another), or reads several that adjoin.
    """
    aligned: list[tuple[int, int]] = []
    ends: set[int] = set()
    for start, end in sorted(spans):
        if start % ALIGNMENT_BYTES and start not in ends:
            continue
        ends.add(end)
        if aligned and start <= aligned[-1][1]:
            start, end = aligned[-1][0], max(end, aligned.pop()[1])
        aligned.append((start, end))
    for start, end in spans:
        assert start >= 0 and end <= program.arena_bytes
        assert any(a <= start and end <= b for a, b in aligned), f"bytes {start} to {end}"


def run_poisoned(program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a program in a context of its own; before every call, whatever arena bytes nobody reads any more, or not
    before they are written, are filled with NaN. Outputs start as NaN."""
    live = check_plan(program)
    context = Context(program.constants, Arena(program.arena_bytes))
    calls = [call.bind(context) for call in program.calls]
    outputs = [torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype) for spec in program.outputs]
    for output in outputs:
        output.fill_(float("nan") if output.is_floating_point() else 0)
    context.inputs, context.outputs = inputs, outputs
    library = load()
    for space, index, offset, handle in context.moving:
        pointer = {"input": inputs, "output": outputs}[space][index].data_ptr() + offset
        assert not library.lib.zendnn_memory_set_data_handle(handle, library.ffi.cast("void *", pointer))
    arena = context.arena.numpy()[: program.arena_bytes]
    for alive, (function, arguments) in zip(live, calls, strict=True):
        arena[~alive] = POISON
        assert not function(*arguments)
    arena[:] = POISON
    return outputs
