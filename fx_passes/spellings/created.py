"""Tensors that are made of numbers alone: the overload of aten, of which passes know that it writes to nothing.

Graphs that torch.compile hands over call the function; those of torch.export call the overload already.
"""

from __future__ import annotations

from typing import Any

import torch

from fx_passes.graph.graph import is_shape
from fx_passes.spellings.registry import Built, Call, spelled

_RANGES = torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step


@spelled(functions=[torch.arange])
def arange(*bounds: Any, dtype: torch.dtype | None = None, device: Any = None) -> Built:
    """torch.arange of integers: of others the default dtype decides, which each call may find another."""
    if not 1 <= len(bounds) <= len(_RANGES) or not all(type(n) is int or is_shape(n) for n in bounds):
        return None
    given = {"dtype": dtype, "device": device}
    return Call(_RANGES[len(bounds) - 1], bounds, {name: value for name, value in given.items() if value is not None})
