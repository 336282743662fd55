"""What an Int4OpaqueTensor says: the class of 4-bit weights that torchao gives to linear layers on CPUs.

It is known by name: torchao is not imported for it.
"""

from __future__ import annotations

from typing import Any

import torch

from zendnn_cffi.runtime.packed_int4 import SMALLEST

GROUPS = (32, 64, 128, 256)  # that PyTorch's kernel takes


def is_int4_tensor(value: Any) -> bool:
    """Whether value is torchao's Int4OpaqueTensor."""
    return type(value).__qualname__ == "Int4OpaqueTensor" and type(value).__module__.partition(".")[0] == "torchao"


def group_of(weight: Any) -> int | None:
    """How many inputs share a scale, where a linear layer of this weight is ops.int4_linear; None where it is not.

    It is not where inputs are scaled before, or become integers.
    """
    if not is_int4_tensor(weight) or weight.act_pre_scale is not None or weight.act_mapping_type is not None:
        return None
    ones, group = weight.block_size if len(weight.block_size) == 2 else (0, 0)
    fits = ones == 1 and is_packed(weight.qdata, weight.scale_and_zero, group)
    return group if fits and weight.shape == (weight.qdata.shape[0], 2 * weight.qdata.shape[1]) else None


def is_packed(packed: Any, scales: Any, group: int) -> bool:
    """Whether PyTorch's kernel takes these: it reads scales as if they were contiguous, and does not ask."""
    if group not in GROUPS or packed.ndim != 2 or packed.dtype != torch.uint8 or not scales.dtype.is_floating_point:
        return False
    n, k = packed.shape[0], 2 * packed.shape[1]
    fits = n > 0 and n % SMALLEST == 0 and k > 0 and k % group == 0 and scales.shape == (k // group, n, 2)
    return fits and packed.is_contiguous() and scales.is_contiguous()
