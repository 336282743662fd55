"""Linear layers of 4-bit weights: torchao's Int4OpaqueTensor, and the function of PyTorch that it calls.

Before: linear(x, weight, bias)
After:  int4_linear(x, weight.qdata, weight.scale_and_zero, group, block, bias)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fx_passes import ops
from fx_passes.graph.int4_tensor import group_of
from fx_passes.spellings.registry import Built, Call, spelled
from zendnn_cffi.runtime.packed_int4 import block_here


def linear(input: Any, weight: torch.Tensor, part: Callable[[str], Any], bias: Any) -> Built:
    """The layer of an Int4OpaqueTensor; part gives the node of one of its tensors. None where it is not understood."""
    group = group_of(weight)
    if group is None:
        return None
    return Call(ops.int4_linear, (input, part("qdata"), part("scale_and_zero"), group, block_here(), bias))


@spelled("_weight_int4pack_mm_for_cpu")
def product(self: Any, mat2: Any, qGroupSize: int, qScaleAndZeros: Any) -> Built:
    """Weights that a module holds as plain tensors, and what torch.export follows torchao's function to."""
    return Call(ops.int4_linear, (self, mat2, qScaleAndZeros, qGroupSize, block_here()))
