"""Arguments as a line of text."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def show(value: Any) -> str:
    """Return dtype, shape and strides of tensors and arrays, anything else as Python shows it."""
    if isinstance(value, torch.Tensor):
        kind = "" if type(value) is torch.Tensor else f"{type(value).__name__} "
        try:
            place = f"{list(value.stride())}" if value.layout is torch.strided else str(value.layout)
            return f"{kind}{value.dtype}{list(value.shape)}{place}"
        except Exception:
            return f"{kind}without a shape"
    if isinstance(value, np.ndarray):
        return f"numpy {value.dtype}{list(value.shape)}{list(value.strides)}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(show(v) for v in value) + "]"
    return repr(value)
