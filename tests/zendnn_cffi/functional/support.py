"""What the tests of the functions share: tensors in every way a caller may hold them."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st

from zendnn_cffi.engine.library import load

WAYS = ("contiguous", "channels_last", "permuted", "every second", "slice")
# The library has no kernels for bfloat16 without AVX-512: functions raise UnsupportedError there.
DTYPES = (torch.float32, torch.bfloat16) if load().runs("cpu_isa_avx512_core") else (torch.float32,)

few = settings(max_examples=25, deadline=None)
dtypes = st.sampled_from(DTYPES)
ways = st.sampled_from(WAYS)


def hold(tensor: torch.Tensor, way: str) -> torch.Tensor:
    """Return a tensor with the same elements, lying in memory in another way."""
    rank = tensor.dim()
    if way == "channels_last" and rank >= 3:
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    if way == "permuted" and rank >= 2:
        return tensor.permute(*reversed(range(rank))).contiguous().permute(*reversed(range(rank)))
    if way == "every second" and rank >= 1:
        return tensor.repeat_interleave(2, -1)[..., ::2]
    if way == "slice" and rank >= 2:
        wide = torch.full((tensor.shape[0], tensor.shape[1] + 3, *tensor.shape[2:]), 7, dtype=tensor.dtype)
        wide[:, 1:-2] = tensor
        return wide[:, 1:-2]
    return tensor.contiguous()


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def f64(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) else value
