"""How far a result may lie from the oracle: one helper for all tests, from the dtype and the length of the sums.

A float result is compared relative to the scale of the expected tensor (its largest magnitude), because that is what
rounding inside a sum of K products is relative to: small elements of a large-valued result are differences of large
numbers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

# Unit roundoff of each type: half the distance between 1 and the next number
UNIT_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-11}


def tolerance(dtype: torch.dtype, k: int = 1) -> float:
    """Return the allowed error, relative to the largest expected magnitude, of a sum of k products in dtype.

    Rounding errors of a sum grow like sqrt(k) when they are independent; accumulation is in f32 for every type, so bf16
    and f16 pay their own rounding once per stored value (inputs, weights, result: 8 covers a chain of post-ops), and
    f32's for the sum.
    """
    if dtype not in UNIT_ROUNDOFF:
        return 0.0
    accumulate = 16 * math.sqrt(max(k, 1)) * UNIT_ROUNDOFF[torch.float64 if dtype is torch.float64 else torch.float32]
    return 8 * UNIT_ROUNDOFF[dtype] + accumulate


def assert_close(
    actual: Any, expected: Any, *, dtype: torch.dtype | None = None, k: int = 1, scale: float | None = None
) -> None:
    """Fail unless actual equals expected within the tolerance of dtype (default: actual's) for sums of k products.

    actual, expected  tensors or arrays of the same shape; expected may be of a wider type (float64 oracle)
    scale             what the error is relative to, where the largest expected magnitude is not it (cancellation, all
                      zeros)
    Integer results must be equal. NaN and infinities must be in the same places.
    """
    a, e = _tensor(actual), _tensor(expected)
    assert a.shape == e.shape, f"shape {tuple(a.shape)}, expected {tuple(e.shape)}"
    dtype = dtype or a.dtype
    a64, e64 = a.double(), e.double()
    finite = torch.isfinite(e64)
    assert torch.equal(torch.isfinite(a64), finite), (
        "NaN or infinity where the expected result has none, or the other way round"
    )
    assert torch.equal(torch.nan_to_num(a64[~finite]), torch.nan_to_num(e64[~finite])), "different NaNs or infinities"
    if not finite.any():
        return
    difference = (a64 - e64)[finite].abs()
    size = scale if scale is not None else e64[finite].abs().max().item()
    allowed = tolerance(dtype, k) * size
    worst = difference.max().item()
    assert worst <= allowed, (
        f"error {worst:.3g} ({worst / max(size, 1e-300):.2g} of the scale {size:.3g}), allowed {allowed:.3g} for "
        f"{dtype}, k={k}"
    )


def relative_error(actual: Any, expected: Any) -> float:
    """Return the largest difference relative to the largest expected magnitude."""
    a, e = _tensor(actual).double(), _tensor(expected).double()
    return ((a - e).abs().max() / e.abs().max().clamp_min(1e-300)).item() if a.numel() else 0.0


def _tensor(value: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else torch.as_tensor(value).detach()
