"""The classes of torchao's tensors of which the vocabulary has the linear layer."""

from __future__ import annotations

from typing import Any

from fx_passes.graph import int4_tensor, int8_tensor


def is_understood(tensor: Any) -> bool:
    """Whether a linear layer of this weight is known by what the weight is made of."""
    return int8_tensor.understood(tensor) is not None or int4_tensor.group_of(tensor) is not None
