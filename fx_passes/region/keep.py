"""What a region was lowered to, for a file; and programs that a file gives to a region."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fx_passes.candidates.specs import TensorSpec
from fx_passes.region.compile import LoweredRegion


@dataclass(frozen=True)
class ToKeep:
    """What a region was lowered to for one signature.

    threads  PyTorch's, that it is for
    kinds    what each mask says
    lowered  None where plain PyTorch runs, with the reason
    """

    threads: int
    inputs: tuple[TensorSpec, ...]
    kinds: tuple[str, ...]
    lowered: LoweredRegion | None
    reason: str


class Known(Protocol):
    """Programs that a region has for some signatures without choosing anything."""

    def __call__(
        self, region: Any, inputs: Sequence[torch.Tensor], kinds: tuple[str, ...], keep: bool
    ) -> LoweredRegion | None:
        """Return the program for these inputs, None where there is none; NotLowered where plain PyTorch runs."""


def specs_of(signature: tuple[Any, ...]) -> list[TensorSpec] | None:
    """What inputs the signature is of; None where sizes are left open."""
    parts = signature[1:]
    if any("n" in shape for shape, _, _ in parts):
        return None
    return [TensorSpec(tuple(shape), dtype, tuple(strides)) for shape, dtype, strides in parts]


@contextmanager
def thread_count(threads: int) -> Iterator[None]:
    """So many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
