"""Where memory comes from that C reads or writes: plain tensors on the CPU, whatever PyTorch's defaults are.

A default device, a default dtype or a mode that makes fakes changes nothing here. Too little memory is a MemoryError
that names the bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_LIMIT_BYTES = 2**61


def empty(shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> torch.Tensor:
    """Return new memory, not initialised, row-major unless strides (in elements) are given.

    Raises   MemoryError naming the bytes where there are not so many; TypeError where a mode makes other tensors
    """
    shape = tuple(shape)
    reach = math.prod(shape) if strides is None else _reach(shape, strides)
    if reach * dtype.itemsize >= _LIMIT_BYTES:
        raise _too_large(shape, dtype, reach)
    try:
        if strides is None:
            made = torch.empty(shape, dtype=dtype, device="cpu")
        else:
            made = torch.empty_strided(shape, tuple(strides), dtype=dtype, device="cpu")
    except RuntimeError as error:
        raise _too_large(shape, dtype, reach) from error
    return _plain(made)


def filled(shape: Sequence[int], value: float, dtype: torch.dtype) -> torch.Tensor:
    """Return new memory holding one value throughout."""
    return empty(shape, dtype).fill_(value)


def numbers(values: Sequence[float] | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a one-dimensional tensor of these numbers."""
    return _plain(torch.tensor(values, dtype=dtype, device="cpu"))


def on_cpu() -> AbstractContextManager[Any]:
    """New tensors of PyTorch's own code on the CPU, whatever the default device."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@contextmanager
def naming_bytes(doing: str) -> Iterator[None]:
    """Turn PyTorch's RuntimeError for too little memory (a copy of an operand, for instance) into a MemoryError."""
    try:
        yield
    except RuntimeError as error:
        size = re.search(r"tried to allocate (\d+) bytes", str(error))
        if size is None:
            raise
        raise MemoryError(f"{doing}: no memory for {size[1]} bytes") from error


def _reach(shape: tuple[int, ...], strides: Sequence[int]) -> int:
    """How many elements lie between the first and the last, both counted."""
    return 0 if 0 in shape else sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1


def _too_large(shape: tuple[int, ...], dtype: torch.dtype, elements: int) -> MemoryError:
    kind = str(dtype).removeprefix("torch.")
    return MemoryError(f"no memory for {elements * dtype.itemsize} bytes: a result {kind}{list(shape)}")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not torch.Tensor:
        raise TypeError(f"a mode of PyTorch turns new tensors into {type(tensor).__name__}: leave it for this call")
    return tensor
