"""Constants of a region whose parameters were released: packed weights, made plain when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fx_passes.candidates.layouts import row_major
from fx_passes.layout.reorder import reorder_into
from fx_passes.plan.prepack import Packed
from zendnn_cffi.primitives.memory import Memory


class Kept(Mapping[str, torch.Tensor]):
    """Constants of a released region by name: plain ones as they are, packed ones made plain each time."""

    def __init__(self, plain: dict[str, torch.Tensor], packed: Mapping[str, Any]) -> None:
        self._plain, self._packed = plain, packed

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._plain:
            return self._plain[name]
        packed, shape, dtype = self._packed[name]
        return unpacked(packed).reshape(shape).to(dtype)

    @property
    def plain(self) -> list[torch.Tensor]:
        """What is kept plain."""
        return list(self._plain.values())

    def __iter__(self) -> Iterator[str]:
        return iter((*self._plain, *self._packed))

    def __len__(self) -> int:
        return len(self._plain) + len(self._packed)


def unpacked(packed: Packed) -> torch.Tensor:
    """Packed weights as a plain dense tensor of desc's dims, or those swapped where it is the transpose."""
    desc = packed.desc
    assert desc.dtype is not None
    with torch.inference_mode(False):
        plain = torch.empty(desc.dims, dtype=desc.dtype, device="cpu")
    reorder_into(Memory(desc, packed.data.data_ptr()), plain, row_major(desc.dims, desc.dtype))
    return plain.t().contiguous() if packed.transposed else plain
