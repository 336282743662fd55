"""Messages between processes that trust each other: pickles, with the memory of tensors beside them.

    size of the area, number of parts; of each part its size, and where it lies in the area (-1: it follows)
    the parts that follow: the pickle is the first, blocks of tensors' memory come after it

Large blocks lie in areas of memory that both ends map, so that nothing is copied through the system. Messages of one
direction take turns in two areas: at most two questions may be without an answer, and what a question left in its
area is overwritten by the next but one. So an end that hands values on copies them. Only processes that this package
started are at the ends.
"""

from __future__ import annotations

import io
import itertools
import mmap
import os
import pickle
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_HEAD, _PART = struct.Struct("<QQ"), struct.Struct("<Qq")
_FOLLOWS = -1
UNDER_WAY = 2  # questions without an answer, at most; as many areas in each direction
_ALIGNMENT_BYTES = 64
_SMALL_BYTES = 32 << 10  # blocks that have less in all take the way of the pickle
_LARGEST_AREA_BYTES = 256 << 20  # an area stays as large as its largest message
_READ_BYTES = 64 << 10


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


class Area:
    """Memory that two processes map, for what one of them sends. It grows; a file without a name holds it.

    descriptor  of the file, closed with the area
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = memoryview(b"")

    @classmethod
    def made(cls, directions: int = 1) -> list[Area]:
        """New ones for so many directions; none at all where the system does not have so many such files."""
        found: list[Area] = []
        try:
            for _ in range(directions * UNDER_WAY):
                found.append(cls(os.memfd_create("zendnn_cffi")))
        except (AttributeError, OSError):
            for area in found:
                area.close()
            return []
        return found

    @property
    def size_bytes(self) -> int:
        return self._memory.nbytes

    def put(self, parts: Sequence[memoryview]) -> list[int] | None:
        """Copy parts into it; return where each lies, None where there is no room and none to be had."""
        ends = list(itertools.accumulate(-(-part.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for part in parts))
        if not ends or not _SMALL_BYTES <= ends[-1] <= _LARGEST_AREA_BYTES:
            return None
        if ends[-1] > self.size_bytes:
            size_bytes = 1 << (ends[-1] - 1).bit_length()
            try:
                os.posix_fallocate(self.descriptor, 0, size_bytes)  # a page that is missing later would end the process
                self.map(size_bytes)
            except OSError:
                return None
        starts = [0, *ends[:-1]]
        for start, part in zip(starts, parts, strict=True):
            self._memory[start : start + part.nbytes] = part
        return starts

    def map(self, size_bytes: int) -> None:
        """Have so much of it in memory; what was mapped before stays as long as somebody reads it."""
        if size_bytes > self.size_bytes:
            self._memory = memoryview(mmap.mmap(self.descriptor, size_bytes))

    def get(self, start: int, size_bytes: int) -> memoryview:
        """What lies there."""
        return self._memory[start : start + size_bytes]

    def close(self) -> None:
        """Give it back; closing twice is allowed."""
        self._memory = memoryview(b"")
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class Channel:
    """One end of a connection. Not thread-safe.

    end     a connected socket, which the channel closes; while it sends, without a timeout
    ours    the areas for what is sent here, theirs for what is received; none: all goes through the socket
    copies  whether what is received outlives the next message but one
    """

    def __init__(
        self, end: socket.socket, ours: Sequence[Area] = (), theirs: Sequence[Area] = (), *, copies: bool = True
    ) -> None:
        self.end = end
        self._areas, self._copies = (*ours, *theirs), copies
        self._ours, self._theirs = tuple(ours), tuple(theirs)
        self._sent = self._received = 0  # whole messages: both ends count alike, whatever fails before one is sent
        self._read = bytearray()  # and not used yet

    def send(self, value: Any) -> None:
        """Send value. Raises Ended where nobody is there, and what pickle raises for what it does not take.

        Where sending ends in the midst of a message, for want of memory or by an interrupt, the connection does.
        """
        text, blocks = io.BytesIO(), list[pickle.PickleBuffer]()
        _Pickler(text, protocol=5, buffer_callback=blocks.append).dump(value)
        raw = [block.raw() for block in blocks]
        area = self._ours[self._sent % len(self._ours)] if self._ours else None
        places = area.put(raw) if area is not None else None
        following = [text.getbuffer(), *(raw if places is None else ())]
        head = _HEAD.pack(area.size_bytes if area is not None else 0, 1 + len(raw))
        head += _PART.pack(following[0].nbytes, _FOLLOWS)
        head += b"".join(map(_PART.pack, (part.nbytes for part in raw), places or [_FOLLOWS] * len(raw)))
        following[0] = memoryview(head + bytes(following[0]))  # one message, which wakes the other end once
        with self._ending_by_what_fails():
            for part in following:
                self._send_all(part)
        self._sent += 1

    @contextmanager
    def _ending_by_what_fails(self) -> Iterator[None]:
        """The rest of a message would be taken for the next one."""
        try:
            yield
        except OSError as error:
            raise Ended(str(error)) from error
        except BaseException:
            self.end.close()
            self._read.clear()
            raise

    def _send_all(self, data: memoryview) -> None:
        """Send data. What arrives meanwhile is taken in: the other end may read nothing before it has sent all."""
        while data:
            try:
                data = data[self.end.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._await_room()

    def _await_room(self) -> None:
        waiting = select.poll()
        waiting.register(self.end, select.POLLIN | select.POLLOUT)
        [(_, events)] = waiting.poll()
        if events & select.POLLIN:
            found = self.end.recv(_READ_BYTES)
            if not found:
                raise Ended("the other end was closed")
            self._read += found

    def receive(self) -> Any:
        """Return what the other end sent next. Raises Ended where it is gone, and what pickle raises for it."""
        with self._ending_by_what_fails():
            area_bytes, count = _HEAD.unpack(self._take(_HEAD.size))
            parts = [*_PART.iter_unpack(self._take(_PART.size * count))]
            area = self._theirs[self._received % len(self._theirs)] if self._theirs else None
            if area is not None:
                area.map(area_bytes)
            text, *blocks = (self._part(area, size, place) for size, place in parts)
        self._received += 1
        return pickle.loads(text, buffers=blocks)

    def _part(self, area: Area | None, size: int, place: int) -> bytearray | memoryview:
        if place == _FOLLOWS or area is None:
            return self._take(size)
        found = area.get(place, size)
        return bytearray(found) if self._copies else found

    def _take(self, size: int) -> bytearray:
        """The next so many bytes, in memory of their own."""
        data, have = bytearray(size), min(size, len(self._read))
        data[:have] = self._read[:have]
        del self._read[:have]
        rest = memoryview(data)[have:]
        while rest:
            try:
                if rest.nbytes >= _READ_BYTES:
                    count = self.end.recv_into(rest)
                else:  # a message without blocks mostly comes at once
                    found = self.end.recv(_READ_BYTES)
                    count = min(len(found), rest.nbytes)
                    rest[:count] = found[:count]
                    self._read += found[count:]
            except OSError as error:
                raise Ended(str(error)) from error
            if not count:
                raise Ended("the other end was closed")
            rest = rest[count:]
        return data

    def close(self) -> None:
        """Close the socket and the areas."""
        self.end.close()
        for area in self._areas:
            area.close()
