"""Tensors to and from the bytes of a memory descriptor, by PyTorch alone: checks do not rely on what they check."""

from __future__ import annotations

import math

import torch

from zendnn_cffi.primitives.checks import has_internal_overlap
from zendnn_cffi.primitives.memory import MemoryDesc


def is_readable(desc: MemoryDesc) -> bool:
    """Whether the layout is strides and blocks, and no two elements share memory.

    Packed ones (Winograd's weights, compensated int8 weights) are not.
    """
    if desc.outer_strides is None or desc.ptr.extra.flags or desc.dtype not in _TYPES:
        return False
    return not overlaps(desc)


def overlaps(desc: MemoryDesc) -> bool:
    """Whether two elements of a layout of strides and blocks may share memory."""
    return has_internal_overlap(elements(torch.empty(desc.size_bytes, dtype=torch.uint8, device="meta"), desc))


# torch has no arithmetic on 4-bit types
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8, torch.uint8)


def elements(buffer: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    """Return a view of a buffer's elements, padding of blocks included, in the order of the dimensions.

    buffer   [desc.size_bytes] uint8
    Returns  [outer 0, its blocks, outer 1, its blocks, ...], dtype of desc
    """
    assert desc.dtype is not None and desc.outer_strides is not None
    flat = buffer[: desc.size_bytes].view(desc.dtype)
    blocks = desc.inner_blocks
    outer = [size // math.prod(n for axis, n in blocks if axis == i) for i, size in enumerate(desc.padded_dims)]
    inner = [size for _, size in blocks]
    steps = [math.prod(inner[i + 1 :]) for i in range(len(inner))]
    offset = flat.storage_offset() + desc.offset0
    physical = flat.as_strided([*outer, *inner], [*desc.outer_strides, *steps], offset)
    rank = desc.ndim
    order = [p for i in range(rank) for p in (i, *(rank + j for j, (axis, _) in enumerate(blocks) if axis == i))]
    return physical.permute(order)


def write(tensor: torch.Tensor, buffer: torch.Tensor, desc: MemoryDesc) -> None:
    """Write a tensor of desc.dims into a buffer of [desc.size_bytes] uint8, zeros into the padding of blocks."""
    target = elements(buffer, desc)
    padded = tensor.new_zeros(desc.padded_dims, dtype=desc.dtype)
    padded[tuple(map(slice, desc.dims))] = tensor.to(padded.dtype)
    target.copy_(padded.reshape(target.shape))


def read(buffer: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    """Return the tensor that a buffer holds in the layout desc."""
    return elements(buffer, desc).reshape(desc.padded_dims)[tuple(map(slice, desc.dims))]


def gaps(desc: MemoryDesc) -> torch.Tensor | None:
    """Return which bytes between the elements belong to none, [desc.size_bytes] bool; None where all do."""
    if desc.is_dense:
        return None
    assert desc.dtype is not None
    unused = torch.ones(desc.size_bytes, dtype=torch.uint8, device="cpu")
    elements(unused, desc).zero_()
    return unused.bool()
