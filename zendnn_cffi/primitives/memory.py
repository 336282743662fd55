"""Memory objects: a descriptor with the buffer behind it.

Source: zendnn.h of ZenDNN 5.1, group zendnn_api_memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from zendnn_cffi.errors import check
from zendnn_cffi.locks import new_lock
from zendnn_cffi.primitives import checks
from zendnn_cffi.primitives.handles import NotCopyable, native
from zendnn_cffi.primitives.memory_desc import (
    DATA_TYPES,
    MemoryDesc,
    data_type,
    dense_strides,
    numpy_dtype,
    numpy_strides,
    pad,
    plain_desc,
)
from zendnn_cffi.primitives.stream import Engine, Stream, default_stream, engine_or_shared

__all__ = [
    "DATA_TYPES",
    "Engine",
    "Memory",
    "MemoryDesc",
    "Stream",
    "data_type",
    "default_stream",
    "engine_or_shared",
    "dense_strides",
    "pad",
    "pin",
    "plain_desc",
]


class Memory(NotCopyable):
    """A descriptor with the buffer behind it: owns a ``zendnn_memory_t`` and keeps the buffer's owner alive.

    desc    MemoryDesc, not "any"
    data    torch.Tensor or np.ndarray with at least desc.size_bytes bytes behind its first element, of desc.dtype or of
            bytes (uint8, int8), read-only arrays for what is only read; an int address, for which the caller answers;
            or None, to be bound later with ``rebind``
    Raises TypeError, ValueError before any C call.
    Creating or rebinding a Memory in a blocked layout zeroes the padding of the blocks.
    """

    __slots__ = ("__weakref__", "_address", "_engine_handle", "_handle", "_owner", "_pins", "desc")

    def __init__(
        self, desc: MemoryDesc, data: torch.Tensor | np.ndarray | int | None = None, engine: Engine | None = None
    ) -> None:
        if not isinstance(desc, MemoryDesc):
            raise TypeError(f"desc must be a MemoryDesc, got {type(desc).__name__}")
        if desc.is_any:
            raise ValueError("desc leaves the layout open ('any'): query the layout from a PrimitiveDesc first")
        n = native()
        self.desc = desc
        self._pins = 0
        self._address, self._owner = _bind(desc, data)
        self._engine_handle = engine_or_shared(engine).handle
        slot = n.ffi.new("zendnn_memory_t *")
        status = n.lib.zendnn_memory_create(slot, desc.ptr, self._engine_handle, n.ffi.cast("void *", self._address))
        if status:
            check(status, f"creating a memory for {desc}")
        self._handle: Any = n.ffi.gc(slot[0], n.lib.zendnn_memory_destroy)

    @property
    def handle(self) -> Any:
        """The ``zendnn_memory_t``. Raises ValueError once closed."""
        if self._handle is None:
            raise ValueError(f"the memory of {self.desc} is closed: create a new Memory")
        return self._handle

    @property
    def data_ptr(self) -> int:
        """Address of the buffer, 0 while unbound."""
        return self._address

    @property
    def owner(self) -> torch.Tensor | np.ndarray | None:
        """The tensor or array kept alive, if one was given."""
        return self._owner

    def rebind(self, data: torch.Tensor | np.ndarray | int | None) -> None:
        """Point at another buffer of the same descriptor; the handle stays. Refused while an execution is using this
        memory.
        """
        n = native()
        handle = self.handle
        address, owner = _bind(self.desc, data)
        with _pin_lock:
            if self._pins:
                raise ValueError(
                    f"the memory of {self.desc} is in use by an execution in another thread: give each thread its own"
                )
            check(
                n.lib.zendnn_memory_set_data_handle(handle, n.ffi.cast("void *", address)),
                f"rebinding the memory of {self.desc}",
            )
            self._address, self._owner = address, owner

    def close(self) -> None:
        """Give up handle and buffer; an execution already running keeps them until it returns. Closing twice is
        allowed.
        """
        self._handle = None
        self._owner = None
        self._address = 0

    def is_current(self) -> bool:
        """Whether the buffer still lies where it was bound (a tensor's storage can be resized or swapped behind our
        back).
        """
        owner = self._owner
        if owner is None:
            return True
        if isinstance(owner, np.ndarray):
            place = owner.__array_interface__["data"][0]
            return bool(place == self._address and _reach_bytes(owner) >= self.desc.size_bytes)
        return owner.data_ptr() == self._address and checks.storage_bytes(owner) >= self.desc.size_bytes

    @property
    def is_read_only(self) -> bool:
        """Whether the buffer is an array that nobody may write to, such as one on bytes or on a mapped file."""
        return isinstance(self._owner, np.ndarray) and not self._owner.flags.writeable

    def __repr__(self) -> str:
        state = "closed" if self._handle is None else f"{self._address:#x}"
        return f"Memory({self.desc!r}, {state})"


def _reach_bytes(array: np.ndarray) -> int:
    """Bytes from the array's first element to the end of its last one."""
    steps = zip(array.shape, array.strides, strict=True)
    return sum((n - 1) * step for n, step in steps) + array.itemsize if array.size else 0


_pin_lock = new_lock()


def pin(memories: Sequence[Memory], step: int) -> None:
    """Count an execution in (step 1) or out (step -1) on each memory."""
    with _pin_lock:
        for memory in memories:
            memory._pins += step


def _bind(desc: MemoryDesc, data: Any) -> tuple[int, Any]:
    """Return (address, what to keep alive) after checking that the buffer is large enough."""
    if data is None:
        return 0, None
    if isinstance(data, torch.Tensor):
        checks.check_tensor(data, "tensor")
        address, have, dtype = checks.data_pointer(data, "tensor"), checks.storage_bytes(data), data.dtype
    elif isinstance(data, np.ndarray):
        numpy_strides(data)
        dtype = numpy_dtype(data)
        address, have = data.__array_interface__["data"][0], _reach_bytes(data)
        if not data.flags.writeable and desc.padded_dims != desc.dims:
            raise ValueError(f"the array is read-only, and the padding of {desc} is set to zero: pass array.copy()")
    elif isinstance(data, int) and not isinstance(data, bool):
        if not 0 < data < 2**64:
            raise ValueError(
                f"the address must be a positive 64-bit number, got {data} (None leaves the memory unbound)"
            )
        return data, None
    else:
        raise TypeError(f"data must be a torch.Tensor, np.ndarray, an address or None, got {type(data).__name__}")
    if dtype != desc.dtype and dtype not in (torch.uint8, torch.int8):
        raise TypeError(
            f"tensor has dtype {dtype}, the descriptor says {desc.dtype}: convert it, or pass its bytes as uint8"
        )
    if have < desc.size_bytes:
        raise ValueError(f"tensor has {have} bytes behind its first element, {desc} needs {desc.size_bytes}")
    return address, data
