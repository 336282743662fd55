"""Embedding bags: the function, the module and the aten overloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import ops
from fx_passes.spellings import builders as b

_MODES = ("sum", "mean", "max")  # in the order of aten's numbers


def embedding_bag(
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: Any = None,
    norm_type: Any = 2,
    scale_grad_by_freq: Any = False,
    mode: Any = "mean",
    sparse: Any = False,
    per_sample_weights: Any = None,
    include_last_offset: Any = False,
    padding_idx: Any = None,
) -> b.Built:
    """F.embedding_bag; with max_norm it writes to the table, and stays."""
    if max_norm is not None or mode not in _MODES or not b.static(include_last_offset, padding_idx):
        return None
    args = (input, weight, offsets, mode, per_sample_weights, include_last_offset, padding_idx)
    return b.Call(ops.embedding_bag, args)


def embedding_bag_module(m: Any, p: Callable[[str], Any], args: tuple[Any, ...]) -> b.Built:
    """nn.EmbeddingBag."""
    src, offsets, per_sample_weights = (*args, None, None)[:3]
    return embedding_bag(
        src,
        p("weight"),
        offsets,
        m.max_norm,
        mode=m.mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=m.include_last_offset,
        padding_idx=m.padding_idx,
    )


def aten_embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: Any = False,
    mode: Any = 0,
    sparse: Any = False,
    per_sample_weights: Any = None,
    include_last_offset: Any = False,
    padding_idx: Any = None,
) -> b.Built:
    """aten.embedding_bag, the first of its results; -1 is no padding index."""
    padding_idx = None if padding_idx == -1 else padding_idx
    return embedding_bag(
        indices,
        weight,
        offsets,
        mode=_MODES[mode],
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )


FUNCTIONS = {F.embedding_bag: embedding_bag}
MODULES = {nn.EmbeddingBag: embedding_bag_module}
FIRST_RESULT = {
    torch.ops.aten.embedding_bag.default: aten_embedding_bag,
    torch.ops.aten.embedding_bag.padding_idx: aten_embedding_bag,
    torch.ops.aten._embedding_bag.default: aten_embedding_bag,
    torch.ops.aten._embedding_bag_forward_only.default: aten_embedding_bag,
}
