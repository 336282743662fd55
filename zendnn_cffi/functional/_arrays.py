"""From what a caller passes (torch tensors, numpy arrays) to tensors whose bytes C may read or write, without copying.

Everything that could make C touch the wrong bytes is refused here, with the argument's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from zendnn_cffi.primitives import checks
from zendnn_cffi.primitives.memory import MemoryDesc, dense_strides, plain_desc

FLOATS = (torch.float32, torch.bfloat16)
INT8 = (torch.int8, torch.uint8)
MAX_SIZE = 2**31 - 1
FROM_NUMPY = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int32": torch.int32,
    "int64": torch.int64,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class _Readable:
    """Shows numpy a read-only array as a writable one, so that torch takes it without a warning; we only read it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}


def from_numpy(array: np.ndarray, name: str) -> torch.Tensor:
    """Return a tensor on the array's own memory. Raises TypeError, ValueError for arrays torch or the library cannot
    read.
    """
    if not array.dtype.isnative:
        raise TypeError(
            f"{name} has byte order {array.dtype.str!r}: pass {name}.astype({name}.dtype.newbyteorder('='))"
        )
    if array.dtype.name not in FROM_NUMPY:
        raise TypeError(f"{name} has dtype {array.dtype}: convert it, to float32 for instance, with astype")
    if any(s < 0 for s in array.strides):
        raise ValueError(f"{name} has negative strides: pass {name}.copy()")
    if any(s % array.itemsize for s in array.strides) or not array.flags.aligned:
        raise ValueError(f"{name} has elements off their natural alignment: pass {name}.copy()")
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array: pass {name}.filled(value)")
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Readable(array)))


def dtype_names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def as_input(value: Any, name: str, dtypes: Sequence[torch.dtype] | None) -> torch.Tensor:
    """Return a tensor on the memory of ``value``, of one of ``dtypes``, whose elements do not overlap (expanded views
    are copied).
    """
    if isinstance(value, np.ndarray):
        tensor = from_numpy(value, name)
    elif isinstance(value, torch.Tensor):
        tensor = checks.check_tensor(value, name)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires grad, and these functions record no gradients: "
                f"call them under torch.no_grad(), or pass {name}.detach()"
            )
    else:
        raise TypeError(f"{name} must be a torch tensor or a numpy array, got {type(value).__name__}")
    if dtypes is not None and tensor.dtype not in dtypes:
        hint = (
            ""
            if not tensor.is_floating_point() or torch.float32 not in dtypes
            else f": pass {name}.float()"
            if isinstance(value, torch.Tensor)
            else f": pass {name}.astype(np.float32)"
        )
        raise TypeError(f"{name} must be {dtype_names(dtypes)}, got {dtype_names([tensor.dtype])}{hint}")
    if tensor.dim() > checks.MAX_RANK:
        raise ValueError(f"{name} has {tensor.dim()} dimensions, the library takes at most {checks.MAX_RANK}")
    check_sizes(tensor.shape, name)
    checks.data_pointer(tensor, name)
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    if not tensor.is_contiguous() and checks.has_internal_overlap(tensor):
        tensor = tensor.contiguous()
    return tensor


def as_output(value: Any, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on the memory of ``value``, which must be writable and have exactly this shape and dtype."""
    if isinstance(value, np.ndarray):
        if not value.flags.writeable:
            raise ValueError(f"{name} is a read-only array: pass one that may be written, or leave {name} out")
        tensor = from_numpy(value, name)
    elif isinstance(value, torch.Tensor):
        tensor = checks.check_tensor(value, name)
        if tensor.requires_grad:
            raise ValueError(
                f"{name} requires grad: results are written without autograd knowing, pass {name}.detach()"
            )
    else:
        raise TypeError(f"{name} must be a torch tensor or a numpy array, got {type(value).__name__}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype_names([dtype])}, got {dtype_names([tensor.dtype])}")
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    checks.data_pointer(tensor, name)
    if checks.has_internal_overlap(tensor):
        raise ValueError(
            f"{name} is an expanded or overlapping view, where one element would be written more than once"
        )
    return tensor


def check_sizes(shape: Sequence[int], name: str) -> None:
    """Raise ValueError for a size of 2**31 or more: kernels count along a dimension in 32 bits."""
    if shape and max(shape) > MAX_SIZE:
        raise ValueError(f"{name} has shape {list(shape)}, the library takes at most {MAX_SIZE} along a dimension")


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether [N, C, *spatial] lies densely with channels innermost (a 1x1 or one-channel image is both layouts)."""
    memory_format = _CHANNELS_LAST.get(tensor.dim())
    if memory_format is not None:
        return tensor.is_contiguous(memory_format=memory_format)
    return tensor.dim() == 3 and tensor.transpose(1, 2).is_contiguous()


def channels_last_strides(dims: Sequence[int]) -> tuple[int, ...]:
    return dense_strides(dims, (0, *range(2, len(dims)), 1))


def image_strides(src: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return dense strides for a result of this shape: channels innermost where src has them so, else row-major."""
    inner = is_channels_last(src) and not src.is_contiguous()
    return channels_last_strides(shape) if inner else dense_strides(shape)


def layout(tensor: torch.Tensor) -> MemoryDesc:
    """Return the descriptor of a tensor as it lies; the meaningless strides of dimensions of size 1 are made
    regular.
    """
    shape: Sequence[int] = tensor.shape if tensor.dim() else (1,)
    if tensor.is_contiguous():
        return plain_desc(tensor.dtype, tuple(shape), dense_strides(shape))
    if is_channels_last(tensor):
        return plain_desc(tensor.dtype, tuple(shape), channels_last_strides(shape))
    strides = list(tensor.stride())
    beyond = max(s * n for s, n in zip(strides, shape, strict=False))
    strides = [beyond if n == 1 else s for s, n in zip(strides, shape, strict=False)]
    return plain_desc(tensor.dtype, tuple(shape), tuple(strides))


def dense_layout(tensor: torch.Tensor) -> MemoryDesc:
    """Return the tensor's own descriptor where it is dense (in any order of dimensions), else a row-major one."""
    own = layout(tensor)
    return own if own.is_dense else plain_desc(tensor.dtype, own.dims, dense_strides(own.dims))
