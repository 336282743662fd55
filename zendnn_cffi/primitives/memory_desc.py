"""Memory descriptors: how a tensor lies in memory.

Source: zendnn.h and zendnn_types.h of ZenDNN 5.1, group zendnn_api_memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from zendnn_cffi.errors import check
from zendnn_cffi.primitives import checks
from zendnn_cffi.primitives.handles import Immutable, native

# C data types by torch dtype: zendnn_data_type_t
DATA_TYPES: dict[torch.dtype, int] = {
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float32: 3,
    torch.int32: 4,
    torch.int8: 5,
    torch.uint8: 6,
    torch.int16: 7,
    getattr(torch, "int4"): 8,  # noqa: B009  (absent from torch's type stubs)
    getattr(torch, "uint4"): 9,  # noqa: B009
}
TORCH_TYPES: dict[int, torch.dtype] = {code: dtype for dtype, code in DATA_TYPES.items()}
_SHORT = {1: "f16", 2: "bf16", 3: "f32", 4: "s32", 5: "s8", 6: "u8", 7: "s16", 8: "s4", 9: "u4", 0: "undef"}
_BITS = {1: 16, 2: 16, 3: 32, 4: 32, 5: 8, 6: 8, 7: 16, 8: 4, 9: 4, 0: 0}
_ANY, _BLOCKED, _WINO, _RNN_PACKED = 1, 2, 3, 4  # zendnn_format_kind_t
_FRIENDLY: dict[int, dict[str, tuple[int, ...]]] = {
    3: {"ncw": (0, 1, 2), "nwc": (0, 2, 1)},
    4: {"nchw": (0, 1, 2, 3), "nhwc": (0, 2, 3, 1)},
    5: {"ncdhw": (0, 1, 2, 3, 4), "ndhwc": (0, 2, 3, 4, 1)},
}
_BLOCKED_NAMES = {3: "nCw{}c", 4: "nChw{}c", 5: "nCdhw{}c"}


def data_type(dtype: Any, name: str = "dtype") -> int:
    """Return the C data type of a torch dtype. Raises TypeError for one the library does not have."""
    code = DATA_TYPES.get(dtype) if isinstance(dtype, torch.dtype) else None
    if code is None:
        known = ", ".join(str(d).removeprefix("torch.") for d in DATA_TYPES)
        raise TypeError(
            f"{name} must be one of the library's data types ({known}) as a torch.dtype, got {dtype!r}: convert first"
        )
    return code


class MemoryDesc(Immutable):
    """Logical dimensions, data type and physical layout of a tensor: an immutable ``zendnn_memory_desc_t``.

    dims     one int per dimension, 1 to 12 of them, zero allowed
    dtype    torch.dtype; torch.int4 and torch.uint4 stand for s4 and u4
    tag      a layout name of the library: "nhwc", "nchw", "nChw16c", "acdb", "aBcd16b", ... or "any" to let a primitive
             choose
    strides  in elements, instead of a tag; with neither, dense row-major
    Raises TypeError, ValueError; ZenDNNError where the library refuses the combination.
    """

    __slots__ = ("__weakref__", "_hash", "_key", "_ptr", "_size", "dims", "dtype")
    dims: tuple[int, ...]
    dtype: torch.dtype | None
    _ptr: Any
    _key: bytes | None
    _hash: int | None
    _size: int | None

    def __init__(
        self, dims: Sequence[int], dtype: torch.dtype, tag: str | None = None, strides: Sequence[int] | None = None
    ) -> None:
        n = native()
        code = data_type(dtype)
        dims = _checked_dims(dims, _BITS[code])
        rank = len(dims)
        ptr = n.ffi.new("zendnn_memory_desc_t *")
        if tag is not None and strides is not None:
            raise ValueError("give a tag or strides, not both")
        if tag is not None:
            status = n.lib.zendnn_memory_desc_init_by_tag(ptr, rank, pad(dims), code, tag_value(tag), False, False)
            if status:
                check(
                    status,
                    f"describing {_SHORT[code]}{list(dims)} with tag {tag!r} (does the tag have {rank} dimensions?)",
                )
        else:
            steps = dense_strides(dims) if strides is None else _checked_strides(strides, dims)
            status = n.lib.zendnn_memory_desc_init_by_strides(ptr, rank, pad(dims), code, pad(steps), False, False)
            if status:
                check(
                    status,
                    f"describing {_SHORT[code]}{list(dims)} with strides {steps} (each has to be over all"
                    " that the smaller ones reach, gaps included)",
                )
        self._adopt(ptr, dims, dtype)

    def _adopt(self, ptr: Any, dims: tuple[int, ...], dtype: torch.dtype | None) -> None:
        self._set(_ptr=ptr, dims=dims, dtype=dtype, _key=None, _hash=None, _size=None)

    @classmethod
    def wrap(cls, ptr: Any) -> MemoryDesc | None:
        """Return a copy of a descriptor held by C, or None for NULL and for an empty one."""
        n = native()
        if isinstance(ptr, n.ffi.CData) and ptr == n.null:
            return None
        if not isinstance(ptr, n.ffi.CData) or n.ffi.typeof(ptr) is not n.ffi.typeof("zendnn_memory_desc_t *"):
            raise TypeError(f"ptr must be a zendnn_memory_desc_t * of cffi, got {ptr!r}")
        return cls._wrap(ptr)

    @classmethod
    def _wrap(cls, ptr: Any) -> MemoryDesc | None:
        """As wrap(), of what the library returned, which is a descriptor or NULL."""
        return cls._own(_copied(ptr)) if ptr and ptr.ndims else None

    @classmethod
    def _own(cls, ptr: Any) -> MemoryDesc:
        """Return a MemoryDesc around a struct nobody else holds."""
        desc = cls.__new__(cls)
        desc._adopt(ptr, tuple(ptr.dims[0 : ptr.ndims]), TORCH_TYPES.get(ptr.data_type))
        return desc

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor | np.ndarray) -> MemoryDesc:
        """Return the descriptor of a tensor as it lies in memory (shape, dtype, strides); remembered for repeated
        layouts.
        """
        if isinstance(tensor, np.ndarray):
            return cls(tensor.shape, numpy_dtype(tensor), strides=numpy_strides(tensor))
        checks.check_tensor(tensor, "tensor")
        return (
            plain_desc(tensor.dtype, tuple(tensor.shape), tensor.stride())
            if tensor.dim()
            else plain_desc(tensor.dtype, (1,), (1,))
        )

    # ---- what it says

    @property
    def ptr(self) -> Any:
        """A new ``zendnn_memory_desc_t *`` with this content, for calls into C: writing to it changes nothing here."""
        return _copied(self._ptr)

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def is_any(self) -> bool:
        """Whether the layout is left open, for a primitive descriptor to choose."""
        return self._ptr.format_kind == _ANY

    @property
    def is_winograd(self) -> bool:
        """Whether it describes weights that Winograd's transform made."""
        return self._ptr.format_kind == _WINO

    @property
    def is_plain(self) -> bool:
        """Whether strides alone say where each element is: no inner blocks, nothing packed."""
        return self._ptr.format_kind == _BLOCKED and self._ptr.format_desc.blocking.inner_nblks == 0

    @property
    def strides(self) -> tuple[int, ...] | None:
        """Strides in elements, or None unless ``is_plain``."""
        return self.outer_strides if self.is_plain else None

    @property
    def outer_strides(self) -> tuple[int, ...] | None:
        """Strides in elements between blocks (of elements where there are no inner blocks); None for any and packed
        layouts.
        """
        if self._ptr.format_kind != _BLOCKED:
            return None
        return tuple(self._ptr.format_desc.blocking.strides[0 : self.ndim])

    @property
    def inner_blocks(self) -> tuple[tuple[int, int], ...]:
        """Inner blocks as (axis, size), outermost first; empty unless blocked."""
        if self._ptr.format_kind != _BLOCKED:
            return ()
        blocking = self._ptr.format_desc.blocking
        return tuple((blocking.inner_idxs[i], blocking.inner_blks[i]) for i in range(blocking.inner_nblks))

    @property
    def padded_dims(self) -> tuple[int, ...]:
        return tuple(self._ptr.padded_dims[0 : self.ndim])

    @property
    def offset0(self) -> int:
        """Elements between the data pointer and the first element."""
        return int(self._ptr.offset0)

    @property
    def is_dense(self) -> bool:
        """Whether no element position lies unused between the first and the last (padding of blocks counts as used)."""
        if self._ptr.format_kind != _BLOCKED or self._ptr.extra.flags:
            return not self.is_any
        return self.size_bytes - self.offset0 * _BITS[self._ptr.data_type] // 8 <= self.used_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes a buffer must have from the data pointer on, offset0 included; 0 for "any"."""
        if self._size is None:
            self._set(_size=self._find_size())
        return cast(int, self._size)

    @property
    def used_bytes(self) -> int:
        """Bytes of the elements, padding of blocks included, gaps between rows not; 0 for "any"."""
        if self._ptr.format_kind != _BLOCKED or self._ptr.extra.flags:
            return self.size_bytes
        return (math.prod(self.padded_dims) * _BITS[self._ptr.data_type] + 7) // 8

    def _find_size(self) -> int:
        """Return the reach of the layout. The library's own answer counts whole rows, also behind the last element of a
        slice, and is 0 where there is an offset: it serves only for packed layouts.
        """
        if self._ptr.format_kind != _BLOCKED or self._ptr.extra.flags:
            return int(native().lib.zendnn_memory_desc_get_size(self._ptr))
        if 0 in self.dims:
            return 0
        blocks = [1] * self.ndim
        for axis, size in self.inner_blocks:
            blocks[axis] *= size
        steps = zip(self.padded_dims, blocks, self.outer_strides or (), strict=True)
        last = self.offset0 + sum((size // block - 1) * stride for size, block, stride in steps)
        return ((last + math.prod(blocks)) * _BITS[self._ptr.data_type] + 7) // 8

    @property
    def format(self) -> str:
        """A short layout name: "nhwc", "nChw16c", "any", "wino", or the dimensions in stride order like "acdb"."""
        kind = self._ptr.format_kind
        if kind != _BLOCKED:
            return {_ANY: "any", _WINO: "wino", _RNN_PACKED: "rnn_packed"}.get(kind, "undef")
        blocks, strides = self.inner_blocks, self.outer_strides or ()
        if (
            self.ndim in _BLOCKED_NAMES
            and len(blocks) == 1
            and blocks[0][0] == 1
            and list(strides) == sorted(strides, reverse=True)
        ):
            return _BLOCKED_NAMES[self.ndim].format(blocks[0][1])
        if not blocks:
            for name, order in _FRIENDLY.get(self.ndim, {}).items():
                if strides == dense_strides(self.dims, order):
                    return name
        order = tuple(sorted(range(self.ndim), key=lambda i: (-strides[i], i)))
        if not blocks:
            for name, known in _FRIENDLY.get(self.ndim, {}).items():
                if order == known:
                    return name
        blocked = {axis for axis, _ in blocks}
        outer = "".join(chr(ord("A" if i in blocked else "a") + i) for i in order)
        return outer + "".join(f"{size}{chr(ord('a') + axis)}" for axis, size in blocks)

    # ---- views

    def submemory(self, dims: Sequence[int], offsets: Sequence[int]) -> MemoryDesc:
        """Return the descriptor of a box inside this one. In blocked layouts offsets must be multiples of the block."""
        dims = checks.as_dims(dims, "dims", rank=self.ndim)
        offsets = checks.as_dims(offsets, "offsets", rank=self.ndim)
        for axis, (size, offset, whole) in enumerate(zip(dims, offsets, self.dims, strict=False)):
            if size + offset > whole:
                raise ValueError(f"dims[{axis}] + offsets[{axis}] is {size + offset}, past this descriptor's {whole}")
        n = native()
        ptr = n.ffi.new("zendnn_memory_desc_t *")
        check(
            n.lib.zendnn_memory_desc_init_submemory(ptr, self._ptr, pad(dims), pad(offsets)),
            f"taking {list(dims)} at {list(offsets)} of {self} (offsets must be multiples of the block)",
        )
        return self._own(ptr)

    def rebased(self) -> tuple[MemoryDesc, int]:
        """Return this descriptor with offset0 moved into the pointer, and the bytes to add to the data pointer."""
        ptr = self.ptr
        ptr.offset0 = 0
        return self._own(ptr), self.offset0 * _BITS[self._ptr.data_type] // 8

    def reshape(self, dims: Sequence[int]) -> MemoryDesc:
        """Return this memory seen with other dims, same elements in the same order. Raises ZenDNNError where the layout
        forbids it.
        """
        dims = _checked_dims(dims, _BITS[self._ptr.data_type])
        if math.prod(dims) != math.prod(self.dims):
            raise ValueError(
                f"dims {list(dims)} have {math.prod(dims)} elements, this descriptor has {math.prod(self.dims)}"
            )
        n = native()
        ptr = n.ffi.new("zendnn_memory_desc_t *")
        check(
            n.lib.zendnn_memory_desc_reshape(ptr, self._ptr, len(dims), pad(dims)), f"reshaping {self} to {list(dims)}"
        )
        return self._own(ptr)

    def permute(self, axes: Sequence[int]) -> MemoryDesc:
        """Return this memory with dimensions reordered as ``torch.permute(axes)`` does."""
        axes = checks.as_dims(axes, "axes", rank=self.ndim)
        if sorted(axes) != list(range(self.ndim)):
            raise ValueError(f"axes must be a permutation of 0..{self.ndim - 1}, got {axes}")
        inverse = [axes.index(i) for i in range(self.ndim)]  # C wants where each old axis goes
        n = native()
        ptr = n.ffi.new("zendnn_memory_desc_t *")
        check(n.lib.zendnn_memory_desc_permute_axes(ptr, self._ptr, inverse), f"permuting {self} by {axes}")
        return self._own(ptr)

    def with_dtype(self, dtype: torch.dtype) -> MemoryDesc:
        """Return the same layout with another data type of the same layout rules."""
        ptr = self.ptr
        ptr.data_type = data_type(dtype)
        return self._own(ptr)

    # ---- comparing

    @property
    def key(self) -> bytes:
        """The descriptor's bytes: equal keys mean equal descriptors."""
        if self._key is None:
            self._set(_key=bytes(native().ffi.buffer(self._ptr)))
        return cast(bytes, self._key)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, MemoryDesc):
            return NotImplemented
        if self.dims != other.dims or self.dtype != other.dtype:
            return False
        return self.key == other.key or bool(native().lib.zendnn_memory_desc_equal(self._ptr, other._ptr))

    def __hash__(self) -> int:
        if self._hash is None:  # only fields that equality compares: a stride that is never taken is none
            steps = zip(self.padded_dims, self.outer_strides or (), strict=False)
            taken = tuple(stride for size, stride in steps if size != 1)
            kind = int(self._ptr.format_kind)
            self._set(_hash=hash((self.dims, self.dtype, kind, self.offset0, self.inner_blocks, taken)))
        return cast(int, self._hash)

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryDesc:
        return self

    def __copy__(self) -> MemoryDesc:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "MemoryDesc holds a C struct and is not pickled: keep its dims, dtype and tag or strides instead"
        )

    def __repr__(self) -> str:
        offset = f", offset0={self.offset0}" if self.offset0 else ""
        return f"MemoryDesc({_SHORT.get(self._ptr.data_type, '?')}{list(self.dims)}, {self.format}{offset})"


def _copied(ptr: Any) -> Any:
    copy = native().ffi.new("zendnn_memory_desc_t *")
    copy[0] = ptr[0]
    return copy


def plain_desc(dtype: torch.dtype, dims: tuple[int, ...], strides: tuple[int, ...]) -> MemoryDesc:
    """Return the descriptor with these strides; remembered, so that repeated layouts are the same object."""
    key = (dtype, dims, strides)
    desc = _by_layout.get(key)
    if desc is None:
        desc = MemoryDesc(dims, dtype, strides=strides)
        if len(_by_layout) >= 4096:
            _by_layout.clear()
        _by_layout[key] = desc
    return desc


_by_layout: dict[Any, MemoryDesc] = {}


def numpy_dtype(array: np.ndarray) -> torch.dtype:
    if not array.dtype.isnative:
        raise TypeError(
            f"the array has byte order {array.dtype.str!r}: pass array.astype(array.dtype.newbyteorder('='))"
        )
    dtype = _NUMPY_TYPES.get(array.dtype.name)
    if dtype is None:
        raise TypeError(
            f"the array has dtype {array.dtype}: the library has {', '.join(_NUMPY_TYPES)}; convert with astype"
        )
    return dtype


def numpy_strides(array: np.ndarray) -> tuple[int, ...]:
    if any(s < 0 for s in array.strides):
        raise ValueError("the array has negative strides: pass array.copy()")
    if any(s % array.itemsize for s in array.strides):
        raise ValueError("the array's strides are not multiples of its element size: pass np.ascontiguousarray(array)")
    if not array.flags.aligned:
        raise ValueError("the array is not aligned to its element size: pass array.copy()")
    return tuple(s // array.itemsize for s in array.strides)


_NUMPY_TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


def pad(values: Sequence[int]) -> list[int]:
    """Return a zendnn_dims_t initialiser: twelve numbers."""
    return [*values, *_ZEROS[len(values) :]]


_ZEROS = (0,) * checks.MAX_RANK


def dense_strides(dims: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return strides of a dense tensor whose dimensions lie outermost first in ``order`` (row-major when None)."""
    strides = [1] * len(dims)
    step = 1
    for axis in reversed(order if order is not None else range(len(dims))):
        strides[axis] = step
        step *= max(dims[axis], 1)
    return tuple(strides)


def tag_value(tag: str) -> int:
    """Return the number of a layout name. Raises ValueError for a name the library does not have."""
    if not isinstance(tag, str):
        raise TypeError(f"tag must be a layout name such as 'nhwc', got {tag!r}")
    if not _tags:
        for name, value in native().ffi.typeof("zendnn_format_tag_t").relements.items():
            _tags[name.removeprefix("zendnn_")] = value
        for name in ("format_tag_undef", "format_tag_last"):
            _tags.pop(name, None)
        _tags["any"] = _tags["format_tag_any"]
    value = _tags.get(tag)
    if value is None:
        raise ValueError(
            f"{tag!r} is not a layout name of the library (examples: 'nchw', 'nhwc', 'nChw16c', 'ab', 'any')"
        )
    return value


_tags: dict[str, int] = {}


def _checked_dims(dims: Any, bits: int) -> tuple[int, ...]:
    checked = checks.as_dims(dims, "dims")
    if not 1 <= len(checked) <= checks.MAX_RANK:
        raise ValueError(f"dims must have 1 to {checks.MAX_RANK} dimensions, got {len(checked)}")
    if math.prod(max(d, 1) for d in checked) * bits >= 2**61:
        raise ValueError(f"dims {list(checked)} describe more memory than a process can have")
    return checked


def _checked_strides(strides: Any, dims: tuple[int, ...]) -> tuple[int, ...]:
    checked = checks.as_dims(strides, "strides", rank=len(dims))
    if sum((max(n, 1) - 1) * s for n, s in zip(dims, checked, strict=False)) >= 2**58:
        raise ValueError(f"strides {checked} reach further than a process's memory")
    return checked
