"""Embedding bags: the function, the module and the aten overloads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import ops
from fx_passes.spellings.registry import Built, Call, Parameter, spelled, static

aten = torch.ops.aten
_MODES = ("sum", "mean", "max")  # in the order of aten's numbers


def _embedding_bag_module(m: Any, p: Parameter, args: tuple[Any, ...]) -> Built:
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


@spelled(functions=[F.embedding_bag], modules={nn.EmbeddingBag: _embedding_bag_module})
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
) -> Built:
    """F.embedding_bag; with max_norm it writes to the table, and stays."""
    if max_norm is not None or mode not in _MODES or not static(include_last_offset, padding_idx):
        return None
    args = (input, weight, offsets, mode, per_sample_weights, include_last_offset, padding_idx)
    return Call(ops.embedding_bag, args)


@spelled(
    first_result=[
        aten.embedding_bag.default,
        aten._embedding_bag.default,
        aten._embedding_bag_forward_only.default,
    ]
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
) -> Built:
    """aten.embedding_bag, the first of its results; -1 is no padding index."""
    return aten_padded_bag(
        weight,
        indices,
        offsets,
        scale_grad_by_freq,
        mode,
        sparse,
        per_sample_weights,
        include_last_offset,
        None if padding_idx == -1 else padding_idx,
    )


@spelled(first_result=[aten.embedding_bag.padding_idx])
def aten_padded_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: Any,
    mode: Any,
    sparse: Any,
    per_sample_weights: Any,
    include_last_offset: Any,
    padding_idx: Any,
) -> Built:
    """The overload that PyTorch's function calls where it has a padding index: -1 is the last row."""
    return embedding_bag(
        indices,
        weight,
        offsets,
        mode=_MODES[mode],
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )
