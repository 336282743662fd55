"""Memory of large results, used again once nobody holds them.

The C library returns large blocks to the system when they are freed, and each page of a new one costs a fault when it
is first written: several milliseconds a call where results are key-value caches or logits. So their storages are
remembered, and one is lent again when this module alone still refers to it: no tensor, view, array or storage object of
the user's. Storages that were shared between processes or resized meanwhile are forgotten.
"""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zendnn_cffi.locks import new_lock
from zendnn_cffi.runtime.sizes import rounded_up

SMALLEST_BYTES = 128 << 10  # the C library keeps smaller blocks itself
LIMIT_BYTES = 256 << 20  # of all storages remembered
_CPU = torch.device("cpu")
_MOST = 64  # storages of one size: beyond, the user collects results
_MOST_TURNS = 1024  # a storage that was not lent for so many times is forgotten

# How many tensors and storage objects refer to a storage. Without it nothing is used again.
_references: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


@dataclass(eq=False, slots=True)
class _Block:
    """A storage, its address as an object, and when it was lent last."""

    storage: Any
    pointer: int
    size_bytes: int
    turn: int = 0

    def is_free(self) -> bool:
        """Whether this block alone refers to the storage."""
        assert _references is not None
        return _references(self.pointer) == _ALONE[0] and sys.getrefcount(self.storage) == _ALONE[1]

    def is_intact(self) -> bool:
        """Whether its memory is still its own, all of it."""
        return self.storage.nbytes() == self.size_bytes and not self.storage.is_shared()


def _new_block(size_bytes: int) -> _Block:
    with torch.inference_mode(False):
        storage = torch.empty(size_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
    return _Block(storage, storage._cdata, size_bytes)


def _alone() -> tuple[int, int]:
    """The two counts of a storage that nobody holds."""
    block = _new_block(1)
    return (_references(block.pointer) if _references is not None else 0), sys.getrefcount(block.storage)


_ALONE = _alone()


class Pool:
    """Storages that were lent, by size. Thread-safe."""

    def __init__(self) -> None:
        self._blocks: dict[int, deque[_Block]] = {}
        self._size_bytes = 0
        self._turn = 0
        self._lock = new_lock()
        self._is_busy = False  # also seen by a finalizer or signal handler of the same thread

    @property
    def size_bytes(self) -> int:
        """Bytes of the storages remembered, those that users hold included."""
        return self._size_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of those that nobody holds."""
        with self._lock:
            blocks = [block for blocks in list(self._blocks.values()) for block in list(blocks)]
            return sum(block.size_bytes for block in blocks if block.is_free())

    def clear(self) -> None:
        """Forget all; what users hold stays theirs."""
        with self._lock:
            if not self._is_busy:
                self._blocks, self._size_bytes = {}, 0

    def maker(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """What makes tensors as torch.empty_strided, on the CPU; large ones perhaps in memory of former results."""
        shape, strides = tuple(shape), tuple(strides)
        new = partial(torch.empty_strided, shape, strides, dtype=dtype, device=_CPU)
        span = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1 if math.prod(shape) else 0
        if _references is None or span * dtype.itemsize < SMALLEST_BYTES:
            return new
        size_bytes = rounded_up(span * dtype.itemsize)

        def make() -> torch.Tensor:
            with self._lock:
                if self._is_busy:
                    return new()
                return torch.empty(0, dtype=dtype, device=_CPU).set_(self._lend(size_bytes), 0, shape, strides)

        return make

    def empty_strided(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As torch.empty_strided, on the CPU; a large one perhaps in memory that was a result before."""
        return self.maker(shape, strides, dtype)()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As torch.empty, on the CPU; a large one perhaps in memory that was a result before."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if _references is None or size_bytes < SMALLEST_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        with self._lock:
            if self._is_busy:
                return torch.empty(shape, dtype=dtype, device="cpu")
            return torch.empty(0, dtype=dtype, device="cpu").set_(self._lend(rounded_up(size_bytes)), 0, shape)

    def _lend(self, size_bytes: int) -> Any:
        """A storage that nobody holds; the caller has the lock, and is not in the midst of this already."""
        self._is_busy = True
        try:
            return self._found(size_bytes)
        finally:
            self._is_busy = False

    def _found(self, size_bytes: int) -> Any:
        self._turn += 1
        blocks = self._blocks.get(size_bytes)
        if blocks is None:
            blocks = self._blocks[size_bytes] = deque()
        elif blocks and blocks[0].is_free() and blocks[0].is_intact():  # as a rule: what was lent first is back first
            blocks.rotate(-1)
            blocks[-1].turn = self._turn
            return blocks[-1].storage
        block = next((block for block in blocks if block.is_free()), None)  # the one that was lent first comes first
        if block is not None:
            self._forget(block)
        if block is None or not block.is_intact():
            block = _new_block(size_bytes)
            self._make_room(size_bytes)
        block.turn = self._turn
        blocks.append(block)
        self._size_bytes += size_bytes
        if len(blocks) > _MOST or self._size_bytes > LIMIT_BYTES:
            self._forget(blocks[0])
        return block.storage

    def _forget(self, block: _Block) -> None:
        self._blocks[block.size_bytes].remove(block)
        self._size_bytes -= block.size_bytes

    def _make_room(self, size_bytes: int) -> None:
        """Forget what has not been lent for long, and where so many bytes more are too many, whatever is free."""
        for block in [block for blocks in self._blocks.values() for block in blocks]:
            idle = self._turn - block.turn > _MOST_TURNS
            if idle or (self._size_bytes + size_bytes > LIMIT_BYTES and block.is_free()):
                self._forget(block)


results = Pool()


def _begin_anew_in_child() -> None:
    """In a forked child: another thread may have been in the midst of lending."""
    results._blocks, results._size_bytes, results._is_busy = {}, 0, False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew_in_child)
