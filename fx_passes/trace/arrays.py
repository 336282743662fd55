"""Numpy arrays and tensors that lie in the memory of tensors: torch.from_numpy(array), tensor.numpy(), tensor[:4].

    self.array = numpy.zeros(4, "f"); self.buffer = torch.from_numpy(self.array)
    def forward(self, x): self.array += 1; return x + self.buffer

Copies of a module keep that: both lie in the model's memory, or both in new memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy
import torch
from torch import nn

from zendnn_cffi.primitives.checks import extent_bytes

_MAX_DEPTH = 4  # of containers in attributes that are searched
_ALIGNMENT = 64
_CONTAINERS = (list, tuple, dict)
_HOLDERS = (*_CONTAINERS, numpy.ndarray)
Shared: TypeAlias = torch.Tensor | numpy.ndarray


def arrays_in(value: Any, depth: int = 0) -> Iterator[numpy.ndarray]:
    """Arrays in value and in lists, tuples and dictionaries in it."""
    if type(value) is numpy.ndarray:
        yield value
    elif depth < _MAX_DEPTH and isinstance(value, _CONTAINERS):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, _HOLDERS):
                yield from arrays_in(item, depth + 1)


def place_of(value: Shared) -> tuple[int, int]:
    """The addresses of the first byte and behind the last one; both 0 where there is none, or no way to know."""
    if isinstance(value, numpy.ndarray):
        if not value.size or value.dtype.hasobject:
            return 0, 0
        steps = [stride * (n - 1) for n, stride in zip(value.shape, value.strides, strict=True)]
        start = value.ctypes.data
        return start + sum(s for s in steps if s < 0), start + sum(s for s in steps if s > 0) + value.itemsize
    is_plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_nested
    if not is_plain or value.device.type != "cpu" or value.is_neg() or value.is_conj():
        return 0, 0
    if not value.numel() or not value.untyped_storage().nbytes():
        return 0, 0
    return value.data_ptr(), value.data_ptr() + extent_bytes(value)


def shared(tensors: Iterable[torch.Tensor], arrays: Iterable[numpy.ndarray]) -> list[list[Shared]]:
    """Groups of tensors and arrays that lie in one piece of memory, with at least one of each."""
    arrays = list(arrays)
    groups = together((*tensors, *arrays)) if arrays else []
    return [group for group in groups if len({isinstance(value, numpy.ndarray) for value in group}) == 2]


def together(values: Iterable[Shared]) -> list[list[Shared]]:
    """Groups of several tensors and arrays that lie in one piece of memory."""
    every = {id(value): value for value in values}
    placed = sorted(((place_of(value), value) for value in every.values()), key=lambda entry: entry[0])
    groups: list[list[Shared]] = []
    end = 0
    for (start, behind), value in placed:
        if not behind:
            continue
        if start >= end:
            groups.append([])
        groups[-1].append(value)
        end = max(end, behind)
    return [group for group in groups if len(group) > 1]


def moved(group: list[Shared]) -> dict[int, Shared]:
    """By id, new tensors and arrays with the same contents that share new memory as these do theirs."""
    places = [place_of(value) for value in group]
    first = min(start for start, _ in places)
    memory = numpy.zeros(max(end for _, end in places) - first + 2 * _ALIGNMENT, numpy.uint8)
    shift = (first - memory.ctypes.data) % _ALIGNMENT - first  # from addresses to places in memory
    for start, end in places:
        ctypes.memmove(memory.ctypes.data + start + shift, start, end - start)
    whole = torch.from_numpy(memory)
    return {id(value): _at(value, memory, whole, shift) for value in group}


def _at(value: Shared, memory: numpy.ndarray, whole: torch.Tensor, shift: int) -> Shared:
    if isinstance(value, numpy.ndarray):
        return numpy.ndarray(value.shape, value.dtype, memory, value.ctypes.data + shift, value.strides)
    storage, offset = whole.untyped_storage(), (value.data_ptr() + shift) // value.element_size()
    again = torch.empty(0, dtype=value.dtype, device="cpu").set_(storage, offset, value.shape, value.stride())
    again = nn.Parameter(again, value.requires_grad) if isinstance(value, nn.Parameter) else again
    again.__dict__.update(value.__dict__)
    return again
