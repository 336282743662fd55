"""Messages between processes that trust each other: pickles, with the memory of tensors beside them.

    length of what follows: of the pickle, and of each block of memory
    the pickle, the blocks

Tensors and arrays are read into memory of the receiver's own. Only processes that this package started are at the ends.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
from typing import Any

import torch

_COUNT = struct.Struct("<Q")


class Ended(Exception):
    """The other end is gone."""


class _Pickler(pickle.Pickler):
    """Dense tensors in the CPU's memory as that memory; anything else as ever."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided or not value.is_cpu:
            return NotImplemented
        if value.is_quantized or value.is_neg() or value.is_conj() or not value.numel() or value.is_nested:
            return NotImplemented
        order = sorted(range(value.ndim), key=lambda axis: -value.stride(axis))
        dense = value.detach().permute(order)
        if not dense.is_contiguous():  # gaps, or elements that share memory
            order, dense = list(range(value.ndim)), value.detach().contiguous()
        memory = pickle.PickleBuffer(dense.reshape(-1).view(torch.uint8).numpy())
        back = [order.index(axis) for axis in range(value.ndim)]
        return _tensor, (memory, value.dtype, tuple(dense.shape), back, value.requires_grad)


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...], axes: list[int], wants: bool) -> torch.Tensor:
    tensor = torch.frombuffer(memory, dtype=dtype).view(shape).permute(axes)
    return tensor.requires_grad_() if wants else tensor


def send(end: socket.socket, value: Any) -> None:
    """Send value. Raises Ended where nobody is there, and what pickle raises for what it does not take."""
    text, blocks = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(text, protocol=5, buffer_callback=blocks.append).dump(value)
    parts = [text.getbuffer(), *(block.raw() for block in blocks)]
    head = _COUNT.pack(len(parts)) + b"".join(_COUNT.pack(part.nbytes) for part in parts)
    try:
        end.sendall(head)
        for part in parts:
            end.sendall(part)
    except OSError as error:
        raise Ended(str(error)) from error


def receive(end: socket.socket) -> Any:
    """Return what the other end sent next. Raises Ended where it is gone."""
    (count,) = _COUNT.unpack(_read(end, _COUNT.size))
    sizes = [_COUNT.unpack(_read(end, _COUNT.size))[0] for _ in range(count)]
    text, *blocks = (_read(end, size) for size in sizes)
    return pickle.loads(text, buffers=blocks)


def _read(end: socket.socket, size: int) -> bytearray:
    """So many bytes."""
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        try:
            count = end.recv_into(rest)
        except OSError as error:
            raise Ended(str(error)) from error
        if not count:
            raise Ended("the other end was closed")
        rest = rest[count:]
    return data
