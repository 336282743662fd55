"""How regions are lowered."""

from __future__ import annotations

import torch

from fx_passes.candidates.layouts import has_bf16_kernels
from zendnn_cffi.values import dataclass

TUNE_SECONDS = 1.0


def computes_in(dtype: torch.dtype | None) -> torch.dtype | None:
    """RegionOptions.dtype for the one that a user asks for: None where that says nothing, or has no kernels here."""
    return dtype if dtype == torch.bfloat16 and has_bf16_kernels() else None


@dataclass(frozen=True)
class RegionOptions:
    """How regions are lowered.

    dtype           dtype of activations and weights inside (None: each value's own)
    allow_winograd  whether convolutions may use Winograd's algorithm
    tune            "auto", "off" or "full": how implementations are chosen (fx_passes.search.tuner)
    release_weights whether weights are to be few: the parameters will be given up (fx_passes.region.release)
    tune_seconds    how long "auto" may measure for one signature (fx_passes.search.turn); large networks longer
    without         kinds of candidates that are not offered, as their guards failed (fx_passes.candidates.Guard)
    """

    dtype: torch.dtype | None = None
    allow_winograd: bool = True
    tune: str = "auto"
    release_weights: bool = False
    tune_seconds: float = TUNE_SECONDS
    without: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """What measurements depend on. Times that ship are found by it, so it stays as it was where they were made."""
        return f"{self.dtype} {self.allow_winograd} {self.release_weights} {self.without or True}"
