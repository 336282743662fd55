"""How tensors lie in memory, where their shapes alone do not tell.

    transposed, channels last              strides, in dense memory
    expanded, every other column           elements under several indices, or gaps between them
    a buffer and a view of it              what is written to one of them is in the other, too

A file holds the values of each tensor row by row, under its name. Beside them it says where tensors lay: by strides, or
by their places in a piece of memory. That is a tensor of the file where one covers all of the piece, else new memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from fx_passes.candidates.layouts import contiguous_strides
from fx_passes.saved.errors import FileError
from fx_passes.trace.arrays import place_of, together
from zendnn_cffi.primitives.checks import extent_bytes, has_internal_overlap

_ALIGNMENT = 64  # of pieces, so that places in them are multiples of what elements take
Tensors = Mapping[str, torch.Tensor]


def encode_memory(tensors: Tensors) -> dict[str, Any]:
    """Return how the tensors lie in memory, as JSON: strides by name, and pieces [size in bytes, places by name]."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    groups = [[names[id(value)] for value in group] for group in together(tensors.values())]
    inside = {name for group in groups for name in group}
    groups += [[name] for name, tensor in tensors.items() if name not in inside and not _is_dense(tensor)]
    inside.update(name for group in groups for name in group)
    strides = {n: list(t.stride()) for n, t in tensors.items() if n not in inside and not _is_row_major(t)}
    return {"strides": strides, "pieces": [_piece(group, tensors) for group in groups]}


def _piece(names: list[str], tensors: Tensors) -> list[Any]:
    places = {name: place_of(tensors[name]) for name in names}
    first = min(start for start, _ in places.values()) // _ALIGNMENT * _ALIGNMENT
    size_bytes = max(end for _, end in places.values()) - first
    rows = {name: [start - first, list(tensors[name].stride())] for name, (start, _) in places.items()}
    return [-(-size_bytes // _ALIGNMENT) * _ALIGNMENT, rows]


def _is_row_major(tensor: torch.Tensor) -> bool:
    return tensor.stride() == contiguous_strides(tuple(tensor.shape))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether each byte from its first to its last one is of one element. One that is negated has memory of its own."""
    if not place_of(tensor)[1]:
        return True
    return extent_bytes(tensor) == tensor.nbytes and not has_internal_overlap(tensor)


def decode_memory(data: Mapping[str, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return the tensors that do not lie row by row, as they lay. Raises FileError for other than encode_memory's."""
    found = {name: _strided(tensors[name], strides) for name, strides in data["strides"].items()}
    for size_bytes, rows in data.get("pieces", ()):
        for name, (offset, strides) in rows.items():
            _check(name, tensors[name], offset, strides, size_bytes)
        found |= _placed(size_bytes, rows, tensors)
    return found


def _placed(size_bytes: int, rows: Mapping[str, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    first = min(offset for offset, _ in rows.values())
    last = max(offset + _extent_bytes(tensors[name], strides) for name, (offset, strides) in rows.items())
    covering = (
        name
        for name, (offset, strides) in rows.items()
        if offset == first and offset + tensors[name].nbytes == last and _is_row_major_by(tensors[name], strides)
    )
    sizes = {tensors[name].element_size() for name in rows}  # the file aligns each tensor to its own alone
    if len(sizes) == 1 and (whole := next(covering, None)) is not None:
        memory = tensors[whole].view(-1).view(torch.uint8)
        return {name: _at(memory, offset - first, tensors[name], strides) for name, (offset, strides) in rows.items()}
    memory = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu")
    found = {}
    for name, (offset, strides) in rows.items():
        found[name] = _at(memory, offset, tensors[name], strides)
        _fill(found[name], tensors[name])
    return found


def _at(memory: torch.Tensor, offset: int, like: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """A tensor in memory, this many bytes behind its begin."""
    if not like.numel():
        return torch.empty_strided(like.shape, strides, dtype=like.dtype, device="cpu")
    extent = _extent_bytes(like, strides)
    found = memory[offset : offset + extent].view(like.dtype)
    return found.as_strided(like.shape, strides, found.storage_offset())


def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write values, those of an element under several indices once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    if not has_internal_overlap(tensor):
        tensor.copy_(values)
        return
    count = extent_bytes(tensor) // tensor.element_size()
    indices = torch.arange(count, device="cpu").as_strided(tensor.shape, tensor.stride())
    tensor.as_strided((count,), (1,), tensor.storage_offset())[indices.reshape(-1)] = values.reshape(-1)


def _strided(tensor: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """A dense tensor in these strides."""
    if _is_row_major_by(tensor, strides):  # but for dimensions of size 1
        return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _is_row_major_by(tensor: torch.Tensor, strides: list[int]) -> bool:
    """Whether a tensor of this shape lies row by row in these strides; those of dimensions of size 1 say nothing."""
    own = contiguous_strides(tuple(tensor.shape))
    return all(n == 1 or a == b for n, a, b in zip(tensor.shape, own, strides, strict=True))


def _extent_bytes(tensor: torch.Tensor, strides: list[int]) -> int:
    if not tensor.numel():
        return 0
    return (sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True)) + 1) * tensor.element_size()


def _check(name: str, tensor: torch.Tensor, offset: Any, strides: Any, size_bytes: Any) -> None:
    """Raise FileError for a place outside of its piece of memory."""
    numbers = [offset, size_bytes, *strides]
    is_inside = all(type(number) is int and 0 <= number <= 1 << 48 for number in numbers) and (
        len(strides) == tensor.ndim
        and offset % tensor.element_size() == 0
        and size_bytes % _ALIGNMENT == 0
        and offset + _extent_bytes(tensor, strides) <= size_bytes
        and math.prod(tensor.shape) > 0
    )
    if not is_inside:
        raise FileError(f"{name} does not lie where the file says")
