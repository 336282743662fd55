"""How regions are lowered."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RegionOptions:
    """How regions are lowered.

    dtype           dtype of activations and weights inside (None: each value's own)
    allow_winograd  whether convolutions may use Winograd's algorithm
    tune            "auto", "off" or "full": how implementations are chosen (fx_passes.search.tuner)
    release_weights whether weights are to be few: the parameters will be given up (fx_passes.region.release)
    exponentials    whether attention may leave out the softmax's maximum (fx_passes.lower.attention.exponentials)
    """

    dtype: torch.dtype | None = None
    allow_winograd: bool = True
    tune: str = "auto"
    release_weights: bool = False
    exponentials: bool = True
