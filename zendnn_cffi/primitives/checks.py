"""Argument checks made in Python before any C call: what is wrong, with which argument, and what to do.

The library trusts its callers (sizes are never known to it, layouts are not compared), so everything that could make it
read or write outside a buffer is refused here. Wrong kinds of object raise TypeError, wrong values ValueError or
IndexError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from zendnn_cffi.errors import NoDataError

MAX_RANK = 12
_INT64_MAX = 2**63 - 1


def describe(value: Any) -> str:
    """Return a short text for messages: ``f32[2, 3]`` for arrays, the type name for anything else."""
    if is_array(value) and not is_lazy(value):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def as_int(value: Any, name: str, *, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return ``value`` as a Python int.

    Taken are ints, numpy's integers, and 0-d integer tensors and arrays. Raises TypeError for anything else, ValueError
    outside the bounds.
    """
    number = value if type(value) is int else _integer(value, name)
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    if number > (_INT64_MAX if maximum is None else maximum):
        raise ValueError(f"{name} must be at most {_INT64_MAX if maximum is None else maximum}, got {number}")
    return number


def _integer(value: Any, name: str) -> int:
    value = _scalar(value, name, "an integer")
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return int(value.__index__())


def as_float(value: Any, name: str) -> float:
    """Return ``value`` as a Python float.

    Taken are numbers, numpy's included, and 0-d tensors and arrays. Raises TypeError for anything else.
    """
    if type(value) is float:
        return value
    value = _scalar(value, name, "a number")
    if isinstance(value, (str, bytes, bool, np.bool_)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name} must be a number, got {value!r}") from error


def as_floats(values: Any, name: str, count: int) -> tuple[float, ...]:
    """Return ``values`` as that many floats; a lone number is repeated. Raises TypeError, ValueError."""
    if is_number(values) or is_array(values) and values.ndim == 0:
        return (as_float(values, name),) * count
    if is_array(values) and values.ndim == 1:
        values = (values if isinstance(values, np.ndarray) else _readable(values, name)).tolist()
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a number or a sequence of numbers, got {shown(values)}")
    if len(values) != count:
        raise ValueError(f"{name} must be one number or {count}, got {len(values)}")
    return tuple(as_float(v, f"{name}[{i}]") for i, v in enumerate(values))


def as_bool(value: Any, name: str) -> bool:
    """Return a flag. Raises TypeError for anything but True and False (numpy's too): 0, "no" and [] are no flags."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {shown(value)}")


def as_dims(
    values: Any, name: str, *, rank: int | None = None, minimum: int | None = 0, single: bool = False
) -> tuple[int, ...]:
    """Return ``values`` as a tuple of ints >= minimum.

    A lone integer is repeated ``rank`` times when a rank is given, and is a sequence of one if ``single``. Sequences
    may be one-dimensional integer tensors or arrays. Raises TypeError, ValueError.
    """
    if (rank is not None or single) and _is_lone(values):
        values = (as_int(values, name, minimum=minimum),) * (1 if rank is None else rank)
    if is_array(values) and values.ndim == 1:
        values = (values if isinstance(values, np.ndarray) else _readable(values, name)).tolist()
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a sequence of integers, got {shown(values)}")
    dims = tuple(
        v
        if type(v) is int and minimum is not None and minimum <= v <= _INT64_MAX
        else as_int(v, f"{name}[{i}]", minimum=minimum)
        for i, v in enumerate(values)
    )
    if rank is not None and len(dims) != rank:
        raise ValueError(f"{name} must have {rank} values, one per dimension, got {len(dims)}: {dims}")
    return dims


def shown(value: Any) -> str:
    """Return a value as a message shows it: arrays by dtype and shape."""
    return describe(value) if is_array(value) else repr(value)


def is_array(value: Any) -> bool:
    """Whether this is a tensor or an array."""
    return isinstance(value, (torch.Tensor, np.ndarray))


def is_number(value: Any) -> bool:
    """Whether this is a number of Python's or numpy's (not a flag)."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _is_lone(value: Any) -> bool:
    return value.ndim == 0 if is_array(value) else hasattr(value, "__index__")


def _scalar(value: Any, name: str, wanted: str) -> Any:
    """Return the number that a 0-d tensor or array holds; anything else as it is. Refuses those of more dimensions."""
    if not is_array(value):
        return value
    if value.ndim:
        raise TypeError(f"{name} must be {wanted}, got {describe(value)}: pass one element of it")
    return (value if isinstance(value, np.ndarray) else _readable(value, name)).item()


def _readable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    data_pointer(check_tensor(tensor.detach(), name), name)
    return tensor.detach()


def check_tensor(tensor: Any, name: str) -> torch.Tensor:
    """Return ``tensor`` if its bytes can be handed to C: a dense, strided CPU tensor with real storage, not lazily
    negated or conjugated.

    Raises TypeError for anything that is not a plain tensor (fakes, wrappers), ValueError for one whose data cannot be
    used.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
    if type(tensor) is not torch.Tensor:
        _check_subclass(tensor, name)
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is a sparse or compressed tensor ({tensor.layout}): pass {name}.to_dense()")
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is on device {tensor.device}, the library computes on the CPU: pass {name}.cpu()"
            if tensor.device.type != "meta"
            else f"{name} is a meta tensor: it has a shape but no data"
        )
    if tensor.is_quantized:
        raise ValueError(
            f"{name} is a quantized tensor ({tensor.dtype}): pass {name}.dequantize() or {name}.int_repr()"
        )
    if tensor.is_nested:
        raise ValueError(f"{name} is a nested tensor: pass its parts one by one")
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(f"{name} is a lazily negated or conjugated view: pass {name}.resolve_neg().resolve_conj()")
    return tensor


def _check_subclass(tensor: torch.Tensor, name: str) -> None:
    """Refuse tensors whose numbers are not simply what their memory holds."""
    if is_lazy(tensor):
        raise ValueError(
            f"{name} is an uninitialized parameter of a lazy module, without shape or data: call the module once before"
        )
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(
            f"{name} is a {type(tensor).__name__}, which gives its memory a meaning of its own: pass a plain tensor"
        )


def data_pointer(tensor: torch.Tensor, name: str) -> int:
    """Return the address of a checked tensor's first element; refuses tensors whose elements are not all in memory."""
    try:
        address = tensor.data_ptr()
    except Exception as error:  # functorch wrappers and tracing subclasses raise different types here
        raise TypeError(f"{name} has no storage of its own ({type(tensor).__name__}): pass a plain tensor") from error
    if address == 0 and tensor.numel():
        raise ValueError(f"{name} has a shape but no data behind it ({type(tensor).__name__}): pass a plain tensor")
    if 0 < (needed := extent_bytes(tensor)) > storage_bytes(tensor):
        raise ValueError(
            f"{name} needs {needed} bytes, its storage has {storage_bytes(tensor)} left: it was resized meanwhile"
        )
    if address % tensor.element_size():
        raise ValueError(
            f"{name} is not aligned to its element size ({tensor.element_size()} bytes): pass {name}.clone()"
        )
    return address


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes of storage lie behind the tensor's first element."""
    return int(tensor.untyped_storage().nbytes()) - int(tensor.storage_offset()) * tensor.element_size()


def extent_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes, from its first element, a view with these strides spans."""
    if tensor.numel() == 0:
        return 0
    return (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=False)) + 1) * tensor.element_size()


def check_storage(tensor: torch.Tensor, name: str) -> None:
    """Raise NoDataError where the tensor's storage was freed or shrunk, so that some elements have no memory."""
    if (needed := extent_bytes(tensor)) > 0 and storage_bytes(tensor) < needed:
        raise NoDataError(
            f"{name}, {describe(tensor)}, has no data behind some of its elements: its storage was freed or resized to"
            f" {tensor.untyped_storage().nbytes()} bytes"
        )


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors share a byte; interleaved views that share none are recognised as apart."""
    start_a, start_b = a.data_ptr(), b.data_ptr()
    if not (start_a and start_b):  # empty, or freed
        return False
    if start_a + extent_bytes(a) <= start_b or start_b + extent_bytes(b) <= start_a:
        return False
    try:
        return np.shares_memory(np.asarray(_Place(a)), np.asarray(_Place(b)), max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Place:
    """Where a strided tensor of any dtype lies, negated and conjugated ones included, as numpy asks for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
        }


def same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are the very same elements in the same order (an exact in-place pair)."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and a.shape == b.shape
        and all(s == t or n <= 1 for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=False))
    )


def has_internal_overlap(tensor: torch.Tensor) -> bool:
    """Return whether two indices of the tensor may name the same element (expanded or as_strided views)."""
    return strides_overlap(tensor.shape, tensor.stride())


def strides_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether two indices of such a tensor may name the same element."""
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def strides_are_nested(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the library takes such a tensor: each step is over all of what the smaller ones reach, gaps too.

    [:, ::2] of five columns is none: three elements with gaps are six wide, and the next row begins after five.
    """
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1):
        if stride < max(reach, 1):
            return False
        reach = stride * size
    return True
