"""State spaces whose numbers come from the input, a step of a sequence after the other: Mamba's selective scan."""

from __future__ import annotations

import torch
from torch import Tensor

from fx_passes.ops.recurrent import with_state_behind
from fx_passes.ops.registry import COMPUTE, op


@op(kind=COMPUTE, row_major=True)
def selective_scan(
    delta: Tensor, a: Tensor, drive: Tensor, b: Tensor, c: Tensor, state: Tensor | None, *, with_state: bool = False
) -> Tensor:
    """Return [B, D, T]: what is read of D states of N numbers each, after each of T steps.

    state of step t = exp(delta[t] * a) * state before it + drive[t] * b[t];  read of it: its product with c[t]

    delta       [B, D, T], the lengths of steps, which discretise the model
    a           [D, N], the rates by which states decay
    drive       [B, D, T]: Mamba's is delta * input
    b, c        [B, T, N]
    state       [B, D, N] before the first step; None: zeros
    with_state  return one dimension: what is read as [B, T, D], zeros up to state_offset(B * T * D), and the last state
                as [B, N, D]
    """
    read, last = selective_scan_and_state(delta, a, drive, b, c, state)
    if not with_state:
        return read
    return with_state_behind(read.transpose(1, 2), last.transpose(1, 2))


@op(kind=COMPUTE, several=True, no_rule="it becomes one scan, with both in one result, where shapes are known")
def selective_scan_and_state(
    delta: Tensor, a: Tensor, drive: Tensor, b: Tensor, c: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what selective_scan reads, and [B, D, N], the state after the last step."""
    decays = torch.exp(delta.unsqueeze(-1) * a.unsqueeze(1))
    drives = drive.unsqueeze(-1) * b.unsqueeze(1)
    read = []
    if state is None:
        state = torch.zeros_like(drives[:, :, 0])
    for step in range(delta.shape[-1]):
        state = torch.addcmul(drives[:, :, step], decays[:, :, step], state)
        read.append((state @ c[:, step].unsqueeze(-1)).squeeze(-1))
    return torch.stack(read, -1), state.contiguous()
