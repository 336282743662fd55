"""Argument checks made in Python before any C call: what is wrong, with which argument, and what to do.

The library trusts its callers (sizes are never known to it, layouts are not compared), so everything that could make it
read or write outside a buffer is refused here. Wrong kinds of object raise TypeError, wrong values ValueError or
IndexError.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

MAX_RANK = 12
_INT64_MAX = 2**63 - 1


def describe(value: Any) -> str:
    """Return a short text for messages: ``f32[2, 3]`` for arrays, the type name for anything else."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def as_int(value: Any, name: str, *, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return ``value`` as a Python int. Raises TypeError unless it is an integer, ValueError outside the bounds."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name} must be an integer, got {value!r}"
            if not isinstance(value, torch.Tensor)
            else f"{name} must be an integer, got a tensor: use int(...)"
        )
    number = int(value.__index__())
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    if number > (_INT64_MAX if maximum is None else maximum):
        raise ValueError(f"{name} must be at most {_INT64_MAX if maximum is None else maximum}, got {number}")
    return number


def as_float(value: Any, name: str) -> float:
    """Return ``value`` as a Python float that fits a C float. Raises TypeError for anything that is not a number."""
    if isinstance(value, (str, bytes)) or isinstance(value, torch.Tensor) and value.numel() != 1:
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name} must be a number, got {value!r}") from error
    return number


def as_dims(values: Any, name: str, *, rank: int | None = None, minimum: int = 0) -> tuple[int, ...]:
    """Return ``values`` as a tuple of ints >= minimum; a single int is repeated ``rank`` times when a rank is given."""
    if rank is not None and hasattr(values, "__index__") and not isinstance(values, (torch.Tensor, np.ndarray)):
        values = (values,) * rank
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of integers, got {values!r}")
    dims = tuple(
        v if type(v) is int and minimum <= v <= _INT64_MAX else as_int(v, f"{name}[{i}]", minimum=minimum)
        for i, v in enumerate(values)
    )
    if rank is not None and len(dims) != rank:
        raise ValueError(f"{name} must have {rank} values, one per dimension, got {len(dims)}: {dims}")
    return dims


def check_tensor(tensor: Any, name: str) -> torch.Tensor:
    """Return ``tensor`` if its bytes can be handed to C: a dense, strided CPU tensor with real storage, not lazily
    negated or conjugated.

    Raises TypeError for anything that is not a tensor or array type we can read, ValueError for one whose data cannot
    be used.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
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


def data_pointer(tensor: torch.Tensor, name: str) -> int:
    """Return the address of a checked tensor's first element; refuses fakes and wrappers, which have none."""
    if type(tensor) is not torch.Tensor and type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
        raise ValueError(f"{name} has no storage of its own ({type(tensor).__name__}): pass a plain tensor")
    try:
        address = tensor.data_ptr()
    except Exception as error:  # functorch wrappers, FakeTensor and tracing subclasses raise different types here
        raise ValueError(f"{name} has no storage of its own ({type(tensor).__name__}): pass a plain tensor") from error
    if address == 0 and tensor.numel():
        raise ValueError(f"{name} has a shape but no data behind it ({type(tensor).__name__}): pass a plain tensor")
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


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors share a byte; interleaved views that share none are recognised as apart."""
    start_a, start_b = a.data_ptr(), b.data_ptr()
    if start_a + extent_bytes(a) <= start_b or start_b + extent_bytes(b) <= start_a:
        return False
    try:
        return np.shares_memory(_bytes_view(a), _bytes_view(b), max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _bytes_view(tensor: torch.Tensor) -> np.ndarray:
    """Return a numpy view of any strided tensor with elements of the same width."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(width).numpy()


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
    pairs = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=False) if n > 1)
    reach = 0
    for stride, size in pairs:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
